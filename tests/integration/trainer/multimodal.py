"""Tiny checkpoints with parts that no job trains: for pictures, and for further tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.integration.trainer import tiny

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "vision_use_head": False,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
# Prefix of transformers' classes, and the configurations of text and pictures.
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3.5-pictures": ("Qwen3_5", tiny.GATED_DELTA, _QWEN_VISION),
    "qwen3.5-moe-pictures": (
        "Qwen3_5Moe",
        {
            **tiny.GATED_DELTA,
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 48,
        },
        _QWEN_VISION,
    ),
    "gemma3-pictures": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 6},
        _VISION,
    ),
}


def save_multimodal(name: str, directory: Path) -> Path:
    """Save a bf16 checkpoint of one of the `MULTIMODAL` families, with names as released."""
    import transformers  # takes seconds, and child processes do not need it

    kind, text, vision = MULTIMODAL[name]
    # A picture is one token between two others.
    tokens = {"boi_token_index": 5, "image_token_index": 7, "eoi_token_index": 6}
    more = {**tokens, "mm_tokens_per_image": 1} if kind == "Gemma3" else {}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**tiny._SHAPE, **text}, vision_config=vision, **more
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.08)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "preprocessor_config.json").write_text('{"size": 16}')
    # transformers 4 wrote the released checkpoints, with one more module.
    if kind == "Gemma3":
        rewrite(directory, lambda name: name.replace("vision_tower.", "vision_tower.vision_model."))
    return directory


def rewrite(
    directory: Path, rename: Callable[[str], str], more: dict[str, Tensor] | None = None
) -> None:
    """Rename the tensors of a checkpoint in one file, and add `more`."""
    file = directory / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()} | (more or {})
    save_file(tensors, file, metadata={"format": "pt"})


def add_next_token_layers(directory: Path) -> None:
    """Add a layer that predicts a further token, under the names of the checkpoint's family."""
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    released = text["model_type"] in ("glm4_moe", "deepseek_v3")
    layer = f"model.layers.{text['num_hidden_layers']}" if released else "mtp"
    names = [f"{layer}.eh_proj.weight", f"{layer}.shared_head.norm.weight"]
    rewrite(directory, str, {name: torch.randn(64, 8).bfloat16() for name in names})
    text["num_nextn_predict_layers" if released else "mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
