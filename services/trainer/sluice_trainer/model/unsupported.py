"""The error of a model that cannot be trained, raised before anything is built."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.runtime.pod_env import ConfigurationError


class UnsupportedModelError(ConfigurationError):
    """A checkpoint whose architecture the trainer cannot build; a restart does not help."""


def check_tied(tied: bool, model_type: str, untied: Sequence[str], engine: str) -> None:
    """Check that the engine ties embedding and output layer if the checkpoint does.

    Parameters
    ----------
    tied
        The checkpoint ties them.
    model_type
        Its model type.
    untied
        Model types that the engine never ties, whatever the configuration says.
    engine
        Name of the engine.

    Raises
    ------
    UnsupportedModelError
        The engine would not tie them.

    """
    if tied and model_type in untied:
        raise UnsupportedModelError(
            f"tie_word_embeddings with model_type {model_type!r} is not supported: "
            f"{engine} would not tie them"
        )
