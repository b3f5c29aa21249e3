"""Models that cannot be trained, told before anything is built."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.runtime.pod_env import ConfigurationError


class UnsupportedModelError(ConfigurationError):
    """A checkpoint whose architecture the trainer cannot build. No restart cures it."""


def check_tied(tied: bool, model_type: str, untied: Sequence[str], engine: str) -> None:
    """Raise UnsupportedModelError where embedding and output layer are one tensor only here.

    untied: model types of which the engine has two, whatever the configuration says.
    """
    if tied and model_type in untied:
        raise UnsupportedModelError(
            f"tie_word_embeddings with model_type {model_type!r} is not supported: "
            f"{engine} would not tie them"
        )
