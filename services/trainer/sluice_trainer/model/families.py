"""The check whether a backend can train a model family, from config.json before anything starts.

Megatron's families need no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.api import RLJobSpec
from sluice.engines.arguments import normalized
from sluice.engines.plugin_common import precision
from sluice.images.processor import VISION_FAMILIES, ImageProcessor
from sluice.input_checks import shown
from sluice.model_parts import predicts_further_tokens, tensor_names
from sluice_trainer.model.unsupported import UnsupportedModelError, check_not_quantized

# Layers with a recurrent state whose adapters SGLang's kernels do not compute, by the beginning of
# a model type.
_WITHOUT_VERSIONS = {
    "qwen3_5": ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z"),
    "qwen3_next": ("in_proj_ba",),
}
_EXPERT_ALIASES = {"ep": "ep-size", "expert-parallel-size": "ep-size"}


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
    path = directory / "config.json"
    if path.is_file():
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise UnsupportedModelError(f"{path}: expected an object, found {shown(config)}")
        _check_adapted_layers(spec, config)
        check_not_quantized(config, directory)
    check_precision(spec, directory)
    if directory == Path(spec.model.path):
        check_speculative(spec, directory)
    if spec.trainer.backend == "megatron":
        from sluice_trainer.model.huggingface_config import read_shape

        read_shape(directory)
    elif spec.data.images and not quickly:
        ImageProcessor(directory, trust_remote_code=spec.model.trust_remote_code)
    elif not quickly:
        _check_transformers(spec, path)


def _check_adapted_layers(spec: RLJobSpec, config: Mapping[str, Any]) -> None:
    """Check that an engine that holds several versions of an adapter can compute its layers."""
    lora = spec.trainer.lora
    if lora is None or not spec.computes_versions:
        return
    kind = str(config.get("model_type", ""))
    for family, layers in _WITHOUT_VERSIONS.items():
        left = [name for name in layers if lora.adapts(name)]
        if kind.startswith(family) and left:
            raise UnsupportedModelError(
                f"with weightSync.pauseMode: versions SGLang computes no adapters of "
                f"{', '.join(left)} in a model of type {kind}: add them to "
                "trainer.lora.excludeModules, or set weightSync.pauseMode: in_place"
            )


def check_precision(spec: RLJobSpec, directory: Path) -> None:
    """Check that engines can hold this model in `rollout.precision`.

    Raises
    ------
    ConfigurationError
        They cannot.

    """
    rollout = spec.rollout
    if rollout.precision == "bf16":
        return
    ranks = max(rollout.gpus_per_replica, 1) * rollout.nodes_per_replica
    parallel = normalized(rollout.engine_args, _EXPERT_ALIASES).get("ep-size", 1)
    expert_ranks = ranks // parallel if isinstance(parallel, int) and parallel > 0 else ranks
    config = json.loads((directory / "config.json").read_text())
    names = tensor_names(directory)
    if reason := precision.unfit(rollout.precision, config, names, ranks, max(expert_ranks, 1)):
        raise UnsupportedModelError(f"{directory}: {reason}")


def check_speculative(spec: RLJobSpec, directory: Path) -> None:
    """Check that the checkpoint has what `rollout.speculative` and `trainer.mtp` need.

    Raises
    ------
    UnsupportedModelError
        The checkpoint has no such layers, or the draft model has other tokens.

    """
    speculative = spec.rollout.speculative
    proposes = speculative is not None and speculative.algorithm == "mtp"
    config = json.loads((directory / "config.json").read_text())
    needed = proposes or spec.trainer.mtp
    if needed and not predicts_further_tokens(config, tensor_names(directory)):
        remedy = (
            "rollout.speculative.algorithm: mtp needs: choose another algorithm"
            if proposes
            else "trainer.mtp trains: leave it out"
        )
        raise UnsupportedModelError(
            f"{directory}: the checkpoint has no layers that predict further tokens, which {remedy}"
        )
    if speculative is None or speculative.algorithm != "draft" or speculative.model is None:
        return
    path = Path(speculative.model) / "config.json"
    if not path.is_file():
        raise UnsupportedModelError(
            f"rollout.speculative.model: there is no {path}; expected a Hugging Face checkpoint"
        )
    draft = json.loads(path.read_text())
    tokens, drafted = (
        entry.get("text_config", entry).get("vocab_size") for entry in (config, draft)
    )
    if tokens != drafted:
        raise UnsupportedModelError(
            f"{speculative.model}: the draft model has {drafted} tokens (vocab_size), expected the "
            f"{tokens} of {directory}: choose a draft with the same tokenizer"
        )


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
