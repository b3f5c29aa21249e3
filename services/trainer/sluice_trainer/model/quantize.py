"""Quantization of weights, tensor by tensor, in forms that engines load.

fp8_block is the form in which DeepSeek-V3 is released (arXiv:2412.19437, section 3.3): codes in
E4M3 and a scale for each block of 128 x 128. fp8 and int8 are those of compressed-tensors: a scale
for each row. All are symmetric, and activations are quantized by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from sluice.engines.plugin_common.precision import (
    BLOCK,
    is_quantized,
    kept_modules,
    quantization_config,
)
from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.model.huggingface_files import (
    SHARD_BYTES,
    check_new,
    read_config,
    save_hf,
    stored,
)

# Largest value of E4M3, and of int8 without the one that has no positive twin.
FP8_MAX, INT8_MAX = 448.0, 127


def quantize(source: Path, target: Path, form: str, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a checkpoint whose layers' matrices are quantized. Other tensors stay as they are.

    `form` is fp8-block, fp8 or int8. Memory: one tensor and one file, of `shard_bytes`.

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
    precision = form.replace("-", "_")
    with stored(source) as tensors:
        if not any(map(is_quantized, tensors.names)):
            raise ConfigurationError(f"{source} has no matrix of a layer (..._proj.weight)")
        save_hf(
            quantized(((name, tensors.read(name)) for name in tensors.names), precision),
            target,
            source,
            shard_bytes=shard_bytes,
            config=config
            | {"quantization_config": quantization_config(precision, kept_modules(tensors.names))},
            whole=True,
        )


def quantized(
    tensors: Iterable[tuple[str, Tensor]], precision: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, with those that are quantized as codes and scales.

    Parameters
    ----------
    tensors
        Names of a Hugging Face checkpoint, and full tensors.
    precision
        `fp8`, `fp8_block` or `int8`.

    """
    encode = _ENCODERS[precision]
    for name, tensor in tensors:
        if not is_quantized(name) or tensor.ndim != 2:
            yield name, tensor
            continue
        module = name.removesuffix(".weight")
        for end, part in encode(tensor).items():
            yield f"{module}.{end}", part


def rounded(weight: Tensor, precision: str) -> Tensor:
    """Quantize and dequantize a matrix, or the matrices of all experts: [..., rows, columns].

    The sizes of experts must be multiples of the block's.
    """
    matrix = weight.reshape(-1, weight.shape[-1])
    parts = _ENCODERS[precision](matrix)
    scales = parts.get("weight_scale")
    if scales is None:
        blocks = parts["weight_scale_inv"]
        whole = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        scales = whole[: matrix.shape[0], : matrix.shape[1]]
    return (parts["weight"].float() * scales).to(weight.dtype).view_as(weight)


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


def fp8_rows(weight: Tensor) -> dict[str, Tensor]:
    """Quantize a matrix by rows: `weight`, E4M3, and `weight_scale`, [rows, 1] float32."""
    scaled, scale = _by_rows(weight, FP8_MAX)
    return {"weight": scaled.to(torch.float8_e4m3fn), "weight_scale": scale}


def int8_rows(weight: Tensor) -> dict[str, Tensor]:
    """Quantize a matrix by rows: `weight`, int8, and `weight_scale`, [rows, 1] float32."""
    scaled, scale = _by_rows(weight, INT8_MAX)
    return {"weight": scaled.round().to(torch.int8), "weight_scale": scale}


def _by_rows(weight: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Scale each row to values of at most `most`; return them, and the factors."""
    whole = weight.float()
    scale = whole.abs().amax(1, keepdim=True).clamp(min=1e-12) / most
    return (whole / scale).clamp(-most, most), scale


_ENCODERS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "fp8": fp8_rows,
    "fp8_block": fp8_blocks,
    "int8": int8_rows,
}
