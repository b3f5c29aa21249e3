"""The parts that adapters share: the source of a row, and the sample that a function returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sluice.api import RLJobSpec
from sluice.api.groups.data import PromptSource

if TYPE_CHECKING:
    from sluice_rollout.episode import Episode


class UnsupportedError(Exception):
    """The function does something that sluice does not support. The message says what to do."""


def source_of(spec: RLJobSpec, dataset: str) -> PromptSource | None:
    """Return the prompt source of a data set."""
    held_out = spec.evaluation.datasets if spec.evaluation else []
    return next((s for s in [*spec.data.prompts, *held_out] if s.source_name == dataset), None)


def claim_tokens(episode: Episode, tokens: Sequence[int], mask: Sequence[int]) -> bool:
    """Set the tokens of the sample.

    Parameters
    ----------
    episode
        The episode.
    tokens
        Ids of prompt and response.
    mask
        1 for each token of the response that is trained, else 0.

    Returns
    -------
    True if the response was cut to the limit of the job.

    Raises
    ------
    ClaimError
        If the engine did not sample a token that is trained.

    """
    limit = int(episode.sampling["max_new_tokens"])
    excess = max(len(mask) - limit, 0)
    episode.gateway.claim_sample(list(tokens)[: len(tokens) - excess], list(mask)[:limit])
    return excess > 0


def add_metadata(episode: Episode, metadata: dict[str, Any]) -> None:
    """Add metadata to the sample, except values that its row has already."""
    row = episode.prompt.metadata
    episode.metadata.update({k: v for k, v in metadata.items() if k not in row or row[k] != v})
