"""Conversion of a checkpoint to quantized weights, tensor by tensor, in forms that engines load.

fp8-block is the form in which DeepSeek-V3 is released (arXiv:2412.19437, section 3.3): codes in
E4M3 and a scale for each block of 128 x 128. int8 is that of compressed-tensors: a scale for each
row. Both are symmetric, and activations are quantized by the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.model.huggingface_files import (
    SHARD_BYTES,
    StoredTensors,
    check_new,
    read_config,
    save_hf,
    stored,
)

BLOCK = 128  # rows and columns
# Largest value of E4M3, and of int8 without the one that has no positive twin.
FP8_MAX, INT8_MAX = 448.0, 127
# Matrices of a language model's layers. Embedding, output layer, norms, routers, towers and
# projectors keep their precision, as in the checkpoints that are released.
_MATRIX = re.compile(r"(?:^|\.)layers\.\d+\..+_proj(?:_with_mqa)?\.weight$")
_TOWERS = re.compile(
    r"(?:^|\.)(?:visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\."
)


def quantize(source: Path, target: Path, form: str, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a checkpoint whose layers' matrices are quantized. Other tensors stay as they are.

    `form` is fp8-block or int8. Memory: one tensor and one file, of `shard_bytes`.

    Raises
    ------
    ConfigurationError
        The checkpoint is quantized already, or has no matrix that can be.

    """
    config = read_config(source)
    if config.get("quantization_config"):
        raise ConfigurationError(
            f"{source} is quantized already: `sluice convert dequantize` makes bf16 of it first"
        )
    check_new(target)
    encode, settings = _FORMS[form]
    with stored(source) as tensors:
        if not any(map(is_quantized, tensors.names)):
            raise ConfigurationError(f"{source} has no matrix of a layer (..._proj.weight)")
        save_hf(
            _encoded(tensors, encode),
            target,
            source,
            shard_bytes=shard_bytes,
            config=config | {"quantization_config": settings(_kept(tensors))},
            whole=True,
        )


def is_quantized(name: str) -> bool:
    """Return whether a tensor of this name is quantized: a matrix of a language model's layer."""
    return bool(_MATRIX.search(name)) and not _TOWERS.search(name)


def _kept(tensors: StoredTensors) -> list[str]:
    """Return the modules with matrices that keep their precision, which engines have to know."""
    weights = [name for name in tensors.names if name.endswith(".weight")]
    return sorted(
        {_module(name) for name in weights if not is_quantized(name) and "norm" not in name}
    )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _encoded(
    tensors: StoredTensors, encode: Callable[[Tensor], dict[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    for name in tensors.names:
        tensor = tensors.read(name)
        if not is_quantized(name) or tensor.ndim != 2:
            yield name, tensor
            continue
        for end, part in encode(tensor).items():
            yield f"{_module(name)}.{end}", part


def fp8_blocks(weight: Tensor) -> dict[str, Tensor]:
    """Quantize a matrix in blocks.

    Parameters
    ----------
    weight
        [rows, columns].

    Returns
    -------
    `weight`, E4M3, and `weight_scale_inv`, [blocks of rows, blocks of columns] float32, whose
    product is the matrix.

    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    largest = blocks.abs().amax((1, 3)).clamp(min=1e-12)
    scales = largest / FP8_MAX
    codes = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return {
        "weight": codes.view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn).contiguous(),
        "weight_scale_inv": scales,
    }


def int8_rows(weight: Tensor) -> dict[str, Tensor]:
    """Quantize a matrix by rows: `weight`, int8, and `weight_scale`, [rows, 1] float32."""
    whole = weight.float()
    scale = whole.abs().amax(1, keepdim=True).clamp(min=1e-12) / INT8_MAX
    codes = (whole / scale).round().clamp(-INT8_MAX, INT8_MAX)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}


def _fp8_settings(kept: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }


def _int8_settings(kept: list[str]) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
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


_FORMS: dict[
    str,
    tuple[Callable[[Tensor], dict[str, Tensor]], Callable[[list[str]], dict[str, Any]]],
] = {
    "fp8-block": (fp8_blocks, _fp8_settings),
    "int8": (int8_rows, _int8_settings),
}
