"""Conversion of a quantized checkpoint to bf16, tensor by tensor.

Three forms, in which models are released: FP8 in blocks (DeepSeek, Qwen), MXFP4 (gpt-oss), and
INT4, INT8 and FP8 of compressed-tensors (Kimi). Rounding by quantization is not undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.model.huggingface_files import (
    SHARD_BYTES,
    Config,
    StoredTensors,
    check_new,
    read_config,
    save_hf,
    stored,
)

# Values of the 16 codes of FP4 (E2M1): a sign, two bits of exponent, one of mantissa.
# OCP Microscaling Formats specification 1.0, section 5.3.3.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = (*_FP4, *(-value for value in _FP4))
_EXPONENT_BIAS = 127  # of the scale of an MXFP4 block (E8M0)
_INT4_ZERO = 8  # code of the value 0

# Reads a quantized weight by its base name, such as `model.layers.0.mlp.down_proj.weight`.
Decode = Callable[[StoredTensors, str], Tensor]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A form of quantized weights.

    Attributes
    ----------
    suffix
        End of the name of a quantized weight's codes, in place of which the weight's name ends with
        `becomes`.
    beside
        Ends of the names of the tensors that decode it.
    decode
        Returns the weight in bf16.

    """

    suffix: str
    becomes: str
    beside: tuple[str, ...]
    decode: Decode


def dequantize(source: Path, target: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a checkpoint whose quantized weights are bf16. Other tensors stay as they are.

    Memory: one tensor and one file, of `shard_bytes`.

    Raises
    ------
    ConfigurationError
        The checkpoint is not quantized, or in another form.

    """
    config = read_config(source)
    scheme = scheme_of(config, source)
    check_new(target)
    with stored(source) as tensors:
        save_hf(
            decoded(tensors, scheme),
            target,
            source,
            shard_bytes=shard_bytes,
            config=plain_config(config),
            whole=True,
        )


def plain_config(config: Config) -> Config:
    """Return the configuration of the same model in bf16."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    text = plain.get("text_config")
    if isinstance(text, dict):
        plain["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    key = "torch_dtype" if "torch_dtype" in plain else "dtype"
    return plain | {key: "bfloat16"}


def scheme_of(config: Config, source: Path) -> Scheme:
    """Return how the weights of a checkpoint are quantized.

    Raises
    ------
    ConfigurationError
        They are not, or in another form.

    """
    settings = _quantization(config)
    if not settings:
        raise ConfigurationError(
            f"{source}/config.json has no quantization_config: its weights are not quantized"
        )
    method = settings.get("quant_method")
    if method == "fp8" and (blocks := settings.get("weight_block_size")):
        return Scheme(".weight", ".weight", (".weight_scale_inv",), _fp8_blocks(tuple(blocks)))
    if method == "mxfp4":
        return Scheme("_blocks", "", ("_scales",), _mxfp4)
    if method == "compressed-tensors":
        return _compressed(settings, source)
    raise ConfigurationError(
        f"{source}/config.json: quantization_config: quant_method {method!r}: expected fp8 with "
        "weight_block_size, mxfp4, or compressed-tensors"
    )


def _quantization(config: Config) -> dict[str, Any]:
    text = config.get("text_config") or {}
    return config.get("quantization_config") or text.get("quantization_config") or {}


def _compressed(settings: dict[str, Any], source: Path) -> Scheme:
    """Return the form of compressed-tensors: packed integers, or codes of a byte each."""
    kind = settings.get("format")
    groups = [group["weights"] for group in settings.get("config_groups", {}).values()]
    bits = {group.get("num_bits") for group in groups}
    symmetric = all(group.get("symmetric", True) for group in groups)
    if kind == "pack-quantized" and bits == {4} and symmetric:
        beside = (".weight_scale", ".weight_shape")
        return Scheme(".weight_packed", ".weight", beside, _packed_int4)
    if kind in ("float-quantized", "int-quantized") and bits == {8} and symmetric:
        return Scheme(".weight", ".weight", (".weight_scale", ".input_scale"), _scaled)
    raise ConfigurationError(
        f"{source}/config.json: quantization_config: format {kind!r} with {sorted(map(str, bits))} "
        "bits: expected symmetric codes, pack-quantized with 4 bits, or float-quantized or "
        "int-quantized with 8"
    )


def decoded(tensors: StoredTensors, scheme: Scheme) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a checkpoint, with its quantized weights in bf16."""
    names = tensors.names
    for name in names:
        base = name.removesuffix(scheme.suffix) if name.endswith(scheme.suffix) else None
        if base is not None and base + scheme.beside[0] in names:
            yield base + scheme.becomes, scheme.decode(tensors, base)
        elif not _is_beside(name, scheme, tensors):
            yield name, tensors.read(name)


def _is_beside(name: str, scheme: Scheme, tensors: StoredTensors) -> bool:
    """Return whether a tensor only serves to decode another one."""
    return any(
        name.endswith(end) and name.removesuffix(end) + scheme.suffix in tensors.names
        for end in scheme.beside
    )


def _fp8_blocks(blocks: tuple[int, ...]) -> Decode:
    """Return how a matrix is decoded that has a scale for each block (DeepSeek-V3, section 3.3)."""
    rows, columns = blocks

    def decode(tensors: StoredTensors, base: str) -> Tensor:
        weight = tensors.read(f"{base}.weight")
        scales = tensors.read(f"{base}.weight_scale_inv").float()
        whole = scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        whole = whole[..., : weight.shape[-2], : weight.shape[-1]]
        return (weight.float() * whole).bfloat16()

    return decode


def _scaled(tensors: StoredTensors, base: str) -> Tensor:
    """Decode a matrix with one scale, or one for each row."""
    weight, scale = (tensors.read(f"{base}.{end}") for end in ("weight", "weight_scale"))
    return (weight.float() * scale.float()).bfloat16()


def _mxfp4(tensors: StoredTensors, base: str) -> Tensor:
    """Decode the stacked matrices of experts: [experts, rows, blocks, 16] bytes of two codes each.

    transformers keeps them transposed: [experts, columns, rows].
    """
    codes, scales = tensors.read(f"{base}_blocks"), tensors.read(f"{base}_scales")
    experts, rows, count, size = codes.shape
    result = torch.empty(experts, count * size * 2, rows, dtype=torch.bfloat16)
    values = torch.tensor(_FP4_VALUES)
    for expert in range(experts):  # one at a time, to bound the memory in float32
        low, high = codes[expert] & 0x0F, codes[expert] >> 4
        pairs = torch.stack((values[low.long()], values[high.long()]), -1).flatten(-2)
        exponents = scales[expert].int() - _EXPONENT_BIAS
        matrix = torch.ldexp(pairs, exponents[..., None]).reshape(rows, -1)
        result[expert] = matrix.T.bfloat16()
    return result


def _packed_int4(tensors: StoredTensors, base: str) -> Tensor:
    """Decode a matrix whose rows have eight 4-bit codes in an int32, the lowest bits first."""
    packed, scale = tensors.read(f"{base}.weight_packed"), tensors.read(f"{base}.weight_scale")
    rows, columns = tensors.read(f"{base}.weight_shape").tolist()
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = ((packed[..., None] >> shifts) & 0x0F).flatten(-2)[:, :columns]
    group = -(-columns // scale.shape[1])
    whole = scale.float().repeat_interleave(group, 1)[:, :columns]
    return ((codes - _INT4_ZERO).float() * whole).bfloat16().reshape(rows, columns)
