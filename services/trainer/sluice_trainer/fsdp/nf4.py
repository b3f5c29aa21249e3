"""Frozen linear layers in 4 bits: NF4 of QLoRA (Dettmers et al. 2023).

A block of 64 weights has a scale, its largest absolute value, and each weight is the nearest of 16
levels times that scale. Codes and scales are those of bitsandbytes, without its second quantization
of the scales. A packed weight is a buffer, so FSDP2 shards and gathers none: every process holds
all of them, 0.56 bytes for each weight. (FSDP2 of torch 2.11 shards no integers.)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.fsdp.families import decoder_layers
from sluice_trainer.kernels.compiled import compiled
from sluice_trainer.model.unsupported import UnsupportedModelError

BLOCK = 64
# Bytes of a block: two codes in each, and a float32.
_BLOCK_BYTES = BLOCK // 2 + 4
# Quantiles of the normal distribution, scaled to [-1, 1] (Dettmers et al. 2023, appendix E).
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class NF4Linear(nn.Module):
    """A linear layer whose weight is frozen and packed; passes compute with `dequantized`.

    weight: [out, in / 64 * 36] uint8.
    """

    weight: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("weight", packed(layer.weight.detach()))
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _product(x, self.weight)
        return product if self.bias is None else product + self.bias


# Separate operators, so that a compiled layer keeps only the packed weight between its passes.
# If torch.compile sees inside, it keeps the weights that the forward pass has unpacked, and with
# recomputation the products too: for a 4B model 30 GiB at 16,384 tokens.
@torch.library.custom_op("sluice::nf4_product", mutates_args=())
def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, [..., out]. The frozen weight gets no gradient."""
    return F.linear(x, dequantized(weight, x.dtype))


@torch.library.custom_op("sluice::nf4_input_gradient", mutates_args=())
def _input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of x in `_product`, [..., in]."""
    return gradient @ dequantized(weight, gradient.dtype)


@_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_input_gradient.register_fake
def _(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], weight.shape[1] // _BLOCK_BYTES * BLOCK)


def _keep_weight(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (weight,) = ctx.saved_tensors
    return _input_gradient(gradient, weight), None


_product.register_autograd(_backward, setup_context=_keep_weight)


def quantize_linear_layers(model: Any, routers: frozenset[int]) -> None:
    """Replace the linear layers of the decoder, which are frozen, by packed ones.

    Layers that are trained, and those whose inputs are no multiple of 64, stay as they are.

    Parameters
    ----------
    model
        A model of transformers with adapters.
    routers
        Output sizes of routers; empty if the model is no mixture.

    Raises
    ------
    UnsupportedModelError
        The model is a mixture, whose experts are no linear layers.

    """
    if routers:
        raise UnsupportedModelError(
            "trainer.lora.quantizeBase: nf4 packs linear layers, and most weights of model_type "
            f"{model.config.model_type!r} are experts, which are none: leave it out"
        )
    for block in decoder_layers(model):
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear) and _packs(layer):
                    setattr(parent, name, NF4Linear(layer))


def _packs(layer: nn.Linear) -> bool:
    return not layer.weight.requires_grad and layer.in_features % BLOCK == 0


def packed_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the packed weights of a model by their names."""
    return {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, NF4Linear)
    }


def packed(weight: Tensor) -> Tensor:
    """Return a weight [out, in] as rows of bytes: all codes, then all scales."""
    rows, columns = weight.shape
    if weight.is_meta:
        return torch.empty(rows, columns // BLOCK * _BLOCK_BYTES, dtype=torch.uint8, device="meta")
    blocks = weight.to(DEVICE, torch.float32).view(rows, -1, BLOCK)
    scales = blocks.abs().amax(-1)
    levels = torch.tensor(LEVELS, device=DEVICE)
    # A block of zeros has the scale 0, with any codes.
    ratios = blocks / torch.where(scales == 0, 1.0, scales)[..., None]
    codes = torch.bucketize(ratios, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    codes = codes.view(rows, -1, 2)
    pairs = codes[..., 0] << 4 | codes[..., 1]
    return torch.cat((pairs, scales.view(torch.uint8)), 1).to(weight.device)


def dequantized(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] that a packed weight encodes."""
    return _unpack(weight, _pairs(weight.device), dtype)


@compiled
def _unpack(weight: Tensor, pairs_of: Tensor, dtype: torch.dtype) -> Tensor:
    rows, width = weight.shape
    blocks = width // _BLOCK_BYTES
    pairs, scales = weight[:, : blocks * BLOCK // 2], weight[:, blocks * BLOCK // 2 :]
    values = pairs_of[pairs.int()].view(rows, blocks, BLOCK)
    scales = scales.contiguous().view(torch.float32)
    return (values * scales[..., None]).view(rows, -1).to(dtype)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return both levels of each byte, [256, 2]."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.cartesian_prod(levels, levels)
