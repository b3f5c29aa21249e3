"""Fused operations that Megatron expects from TransformerEngine or Apex, in torch and Triton.

Megatron looks these functions up in its modules when it calls them, so replacing them there is
enough. Functions of an installed TransformerEngine or Apex stay.
"""

from __future__ import annotations

import warnings
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sluice_trainer.kernels import feed_forward
from sluice_trainer.kernels.compiled import COMPILED

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import mlp
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

# --- SwiGLU of dense layers

_megatron_swiglu = mlp.bias_swiglu_impl


def swiglu(up: Tensor, bias: Tensor | None, *options: bool) -> Tensor:
    """[..., 2 f] -> [..., f]. options: Megatron's, for what is stored in FP8 or on the host."""
    if bias is not None or any(options) or not up.is_cuda:
        result: Tensor = _megatron_swiglu(up, bias, *options)
        return result
    return feed_forward.gated(up.flatten(0, -2), None).view(*up.shape[:-1], -1)


def use_fused_swiglu() -> None:
    """Megatron looks its function up at each call."""
    if COMPILED:
        mlp.bias_swiglu_impl = swiglu


# --- weight gradients


def add_weight_gradient(inputs: Tensor, gradients: Tensor, total: Tensor) -> None:
    """Add the product of gradients [n, out], transposed, and inputs [n, in] to total [out, in].

    The total is float32. So is the product inside, also where both others are bf16.
    """
    if total.is_cuda and inputs.dtype != total.dtype:
        torch.addmm(total, gradients.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(gradients.t().to(total.dtype), inputs.to(total.dtype))


def separate_weight_gradients(module: Any) -> None:
    """Let linear layers inside write their weights' gradients apart, as torch does.

    For weights that other code multiplies with as well: Megatron takes a gradient for added once
    one product has done that, for the whole step.
    """
    for layer in module.modules():
        if hasattr(layer, "gradient_accumulation_fusion"):
            layer.gradient_accumulation_fusion = False


if not layers._grad_accum_fusion_available:
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=add_weight_gradient
    )
    layers._grad_accum_fusion_available = True


# --- gradient clipping


def use_fused_clipping() -> None:
    """Let Megatron clip gradients in a few kernels, unless Apex or TransformerEngine does."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = total_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale_all


def total_norm(
    _chunk: int, _overflow: Tensor, lists: list[list[Tensor]], *_: object
) -> tuple[Tensor, None]:
    """The norm of all tensors as one vector: [1] float32, where they are."""
    return torch.nn.utils.get_total_norm(chain.from_iterable(lists)).float().view(1), None


def scale_all(_chunk: int, _overflow: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """Multiply the tensors of the second list, which is the first one too, by the factor."""
    torch._foreach_mul_(lists[1], factor)
