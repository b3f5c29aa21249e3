"""Facts of a job that foreign functions ask for, and the samples that they return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sluice.api import RLJobSpec
from sluice.api.groups.data import PromptSource

if TYPE_CHECKING:
    from sluice_rollout.episode import Episode


class UnsupportedError(Exception):
    """A function does what is not to be had here. The message says what, and what to do."""


def source_of(spec: RLJobSpec, dataset: str) -> PromptSource | None:
    """The source of a row's data set."""
    held_out = spec.evaluation.datasets if spec.evaluation else []
    return next((s for s in [*spec.data.prompts, *held_out] if s.source_name == dataset), None)


def keep(episode: Episode, tokens: Sequence[int], mask: Sequence[int]) -> bool:
    """Train these tokens of prompt and response; True where the response was cut to its limit.

    Raises ClaimError where one was not sampled so.
    """
    most = int(episode.sampling["max_new_tokens"])
    over = max(len(mask) - most, 0)
    episode.gateway.claim_sample(list(tokens)[: len(tokens) - over], list(mask)[:most])
    return over > 0


def note(episode: Episode, metadata: dict[str, Any]) -> None:
    """Add to the sample's metadata what its row does not say already."""
    row = episode.prompt.metadata
    episode.metadata.update({k: v for k, v in metadata.items() if k not in row or row[k] != v})
