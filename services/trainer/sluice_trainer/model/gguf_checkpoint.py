"""Conversion of a GGUF model, llama.cpp's format, to a Hugging Face checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.model.huggingface_files import check_new


def gguf_to_hf(source: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face checkpoint.

    Weights become bf16, or stay fp32 if all matrices of the file are. Rounding by quantization is
    not undone.

    Raises
    ------
    ConfigurationError
        transformers cannot read the file.

    """
    if not source.is_file():
        raise ConfigurationError(f"{source}: no such file; expected a model that ends with .gguf")
    check_new(target)
    if importlib.util.find_spec("gguf") is None:
        raise ConfigurationError("the package gguf is not installed: pip install gguf==0.19.0")
    try:
        model, tokenizer = _read(source)
    except (KeyError, NotImplementedError, OSError, ValueError) as error:
        raise ConfigurationError(f"{source}: transformers cannot read it: {error}") from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for weights in target.glob("*.safetensors"):
        # Pods read them as another user, but safetensors makes them readable by this user only.
        weights.chmod((target / "config.json").stat().st_mode)


def _read(source: Path) -> tuple[Any, Any]:
    """Return model and tokenizer; in steps, because `from_pretrained` would need accelerate."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    dtype = torch.float32 if _is_fp32(source) else torch.bfloat16
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**place), dtype=dtype)
    tensors = load_gguf_checkpoint(
        str(source), return_tensors=True, model_to_load=model, torch_dtype=dtype
    )["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    if lacking := sorted({*missing, *unexpected} - set(model.all_tied_weights_keys)):
        raise ValueError(f"its tensors do not fit the model: {', '.join(lacking[:5])}")
    tokenizer = AutoTokenizer.from_pretrained(**place)
    if (end := model.config.eos_token_id) is not None:
        # transformers mistakes the token that begins a text for the one that ends it (Llama's).
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.clean_up_tokenization_spaces = False  # its default changes texts
    return model, tokenizer


def _is_fp32(source: Path) -> bool:
    from gguf import GGMLQuantizationType, GGUFReader

    matrices = (tensor for tensor in GGUFReader(source).tensors if len(tensor.shape) > 1)
    return all(tensor.tensor_type == GGMLQuantizationType.F32 for tensor in matrices)
