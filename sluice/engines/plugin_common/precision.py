"""Precision of an engine's weights: which of them are quantized, and what config.json says of it.

Trainer, engine and command line must agree on it. Launch scripts of engines import this file too:
it needs the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Read by the launch script: `rollout.precision`.
VARIABLE = "SLUICE_PRECISION"
BLOCK = 128  # rows and columns of a block of fp8_block
# Matrices of a language model's layers. Embedding, output layer, norms, routers, towers and
# projectors keep their precision, as in the checkpoints that are released.
_MATRIX = re.compile(r"(?:^|\.)layers\.\d+\..+_proj(?:_with_mqa)?\.weight$")
_TOWERS = re.compile(
    r"(?:^|\.)(?:visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\."
)
_EMBEDDINGS = ("embed_tokens", "lm_head")
# All experts of a layer in one tensor, as some families store them.
_STACK = re.compile(r"(?:^|\.)layers\.\d+\..*experts\.(?:gate_up_proj|down_proj)$")


def is_quantized(name: str) -> bool:
    """Return whether a tensor of this name is quantized: a matrix of a language model's layer."""
    return bool(_MATRIX.search(name)) and not _TOWERS.search(name)


def kept_modules(names: Iterable[str]) -> list[str]:
    """Return the modules with matrices that keep their precision, which engines have to know."""
    weights = [name for name in names if name.endswith(".weight")]
    return sorted(
        {
            name.removesuffix(".weight")
            for name in weights
            if not is_quantized(name) and "norm" not in name
        }
    )


def quantization_config(precision: str, kept: list[str]) -> dict[str, Any]:
    """Return `quantization_config` of a checkpoint's config.json.

    Parameters
    ----------
    precision
        `fp8`, `fp8_block` or `int8`.
    kept
        Modules that keep their precision.

    """
    if precision == "fp8_block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }
    kind = {"fp8": "float", "int8": "int"}[precision]
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": common | {"strategy": "channel", "dynamic": False},
                "input_activations": common | {"strategy": "token", "dynamic": True},
            }
        },
        "ignore": kept,
    }


def sglang_config(precision: str, kept: list[str]) -> dict[str, Any]:
    """Return `quantization_config` for SGLang.

    Its int8 experts of compressed-tensors need an NPU, and `w8a8_int8` has the same tensors. That
    one never quantizes embeddings, and fails if it should ignore them.
    """
    if precision == "int8":
        ignored = [module for module in kept if not module.endswith(_EMBEDDINGS)]
        return {"quant_method": "w8a8_int8", "ignore": ignored}
    return quantization_config(precision, kept)


def unfit(
    precision: str, config: Mapping[str, Any], names: Iterable[str], ranks: int, expert_ranks: int
) -> str:
    """Return in one sentence why a model cannot have this precision; empty if it can.

    Parameters
    ----------
    precision
        `fp8`, `fp8_block` or `int8`.
    config
        The checkpoint's config.json.
    names
        Names of its tensors.
    ranks, expert_ranks
        Number of parts into which an engine divides matrices, and those of experts.

    """
    if stack := next(filter(_STACK.search, names), None):
        return (
            f"this model has all experts of a layer in one tensor ({stack}), which engines do not "
            "take quantized: leave rollout.precision out"
        )
    if precision != "fp8_block":
        return ""
    wrong = [
        f"{field} ({size})" + (f" / {parts} GPUs" if parts > 1 else "")
        for field, size, parts in _block_sizes(
            config.get("text_config") or config, ranks, expert_ranks
        )
        if size % (BLOCK * parts)
    ]
    return (
        f"rollout.precision: fp8_block needs multiples of {BLOCK}, and {', '.join(wrong)} "
        f"{'is' if len(wrong) == 1 else 'are'} none: set rollout.precision: fp8"
        if wrong
        else ""
    )


def _block_sizes(
    config: Mapping[str, Any], ranks: int, expert_ranks: int
) -> Iterable[tuple[str, int, int]]:
    """Yield sizes that blocks must divide: field, size, and into how many parts it is divided."""
    yield "hidden_size", config["hidden_size"], 1
    if config.get("intermediate_size"):
        yield "intermediate_size", config["intermediate_size"], ranks
    if config.get("moe_intermediate_size"):
        yield "moe_intermediate_size", config["moe_intermediate_size"], expert_ranks
    if config.get("kv_lora_rank"):
        return  # of latent attention only parts are joined that need no whole blocks
    heads = config["num_attention_heads"]
    dimensions = config.get("head_dim") or config["hidden_size"] // heads
    yield "num_attention_heads x head_dim", heads * dimensions, ranks
    pairs = config.get("num_key_value_heads") or heads
    # With more ranks than heads each rank has a whole one.
    yield "num_key_value_heads x head_dim", pairs * dimensions, min(ranks, pairs)
