"""The error of a model that cannot be trained, raised before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def check_not_quantized(config: Mapping[str, Any], directory: Path) -> None:
    """Check that the weights of a checkpoint are not quantized.

    They are not converted at load, because the engine of a job would then have another form than
    the trainer sends, and bf16 has not been shown to reach one that has read FP8.

    Parameters
    ----------
    config
        The checkpoint's config.json.
    directory
        The checkpoint.

    Raises
    ------
    UnsupportedModelError
        They are quantized.

    """
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    settings = config.get("quantization_config") or inner
    if not settings:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    target = f"{str(directory).rstrip('/')}-bf16"
    raise UnsupportedModelError(
        f"{directory}: its weights are quantized ({method}), and quantized weights cannot be "
        f"trained: run `sluice convert dequantize {directory} {target}`, and name {target} "
        "instead; engines read it too"
    )
