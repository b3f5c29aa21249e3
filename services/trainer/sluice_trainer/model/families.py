"""Model families that a backend can train, told from a checkpoint's config.json before anything is
started. No torch is needed for Megatron's.
"""

from __future__ import annotations

import json
from pathlib import Path

from sluice.api import RLJobSpec
from sluice_trainer.model.unsupported import UnsupportedModelError


def check_family(spec: RLJobSpec, directory: Path, *, quickly: bool = False) -> None:
    """Raise UnsupportedModelError where `trainer.backend` cannot train this checkpoint.

    What only the built model tells, it does not. quickly: leave out what needs transformers, which
    takes seconds to import, and keeps torch in memory.
    """
    if spec.trainer.backend == "megatron":
        from sluice_trainer.model.huggingface_config import read_shape

        read_shape(directory)
    elif not quickly:
        _check_transformers(spec, directory / "config.json")


def _check_transformers(spec: RLJobSpec, path: Path) -> None:
    """FSDP2 trains what transformers has as a causal language model, or what brings its code."""
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    config = json.loads(path.read_text())
    own_code = spec.model.trust_remote_code and "auto_map" in config
    if not own_code and config.get("model_type") not in NAMES:
        raise UnsupportedModelError(
            f"{path}: model_type {config.get('model_type')!r} is no language model of "
            f"transformers {__version__}"
        )
