"""The check whether a backend can train a model family, from config.json before anything starts.

Megatron's families need no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.images.processor import VISION_FAMILIES, ImageProcessor
from sluice_trainer.model.unsupported import UnsupportedModelError


def check_family(spec: RLJobSpec, directory: Path, *, quickly: bool = False) -> None:
    """Check that `trainer.backend` can train this checkpoint, as far as config.json shows it.

    Parameters
    ----------
    spec
        Spec of the job.
    directory
        Hugging Face checkpoint.
    quickly
        Leave out checks that need transformers, which takes seconds to import and loads torch.

    Raises
    ------
    ConfigurationError
        The backend cannot train it.

    """
    if spec.trainer.backend == "megatron":
        from sluice_trainer.model.huggingface_config import read_shape

        read_shape(directory)
    elif spec.data.images and not quickly:
        ImageProcessor(directory, trust_remote_code=spec.model.trust_remote_code)
    elif not quickly:
        _check_transformers(spec, directory / "config.json")


def _check_transformers(spec: RLJobSpec, path: Path) -> None:
    """Check that transformers, or the code of the checkpoint, has a causal language model."""
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    config = json.loads(path.read_text())
    own_code = spec.model.trust_remote_code and "auto_map" in config
    if not own_code and config.get("model_type") not in NAMES:
        sees = config.get("model_type") in VISION_FAMILIES
        raise UnsupportedModelError(
            f"{path}: model_type {config.get('model_type')!r} is no language model of "
            f"transformers {__version__}"
            + (": set data.images: {} to train it as a vision-language model" if sees else "")
        )
