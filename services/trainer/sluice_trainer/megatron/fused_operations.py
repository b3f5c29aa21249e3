"""Fused operations that Megatron expects from TransformerEngine or Apex, in torch and Triton.

Megatron looks these functions up in its modules when it calls them, so replacing them there is
enough. Functions of an installed TransformerEngine or Apex stay.

- SwiGLU of dense layers: Megatron leaves its fusion to torch.compile, whose backward pass took
  twice the time of reading and writing its tensors.
- Weight gradients: Megatron expects Apex (`gradient_accumulation_fusion`). Without it a product in
  bf16 is written, read again and added by another kernel, and the gradient of each micro-batch is
  rounded to bf16 first. torch has the fused product of cuBLAS since 2.8.
- Norm and clipping of gradients: without TransformerEngine or Apex, Megatron waits for the GPU once
  for each gradient and scales one after another; a mixture of experts has thousands.
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
    """Return SwiGLU of `up`: [..., 2 f] -> [..., f].

    options: Megatron's, for activations that are stored in FP8 or on the host.
    """
    if bias is not None or any(options) or not up.is_cuda:
        result: Tensor = _megatron_swiglu(up, bias, *options)
        return result
    return feed_forward.gated(up.flatten(0, -2), None).view(*up.shape[:-1], -1)


def use_fused_swiglu() -> None:
    """Replace Megatron's SwiGLU if kernels can be compiled."""
    if COMPILED:
        mlp.bias_swiglu_impl = swiglu


# --- weight gradients


def add_weight_gradient(inputs: Tensor, gradients: Tensor, total: Tensor) -> None:
    """Add gradients [n, out], transposed, times inputs [n, in] to total [out, in].

    The total is float32, and the product accumulates in float32 even if both factors are bf16.
    """
    if total.is_cuda and inputs.dtype != total.dtype:
        torch.addmm(total, gradients.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(gradients.t().to(total.dtype), inputs.to(total.dtype))


def separate_weight_gradients(module: Any) -> None:
    """Let the linear layers of a module return their weights' gradients to autograd.

    This is for weights that other code also multiplies: Megatron considers a gradient added for the
    whole step once one product has added it.
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
    """Let Megatron clip gradients by `total_norm` and `scale_all`.

    If Apex or TransformerEngine is installed, Megatron keeps their functions.
    """
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = total_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale_all


def total_norm(
    _chunk: int, _overflow: Tensor, lists: list[list[Tensor]], *_: object
) -> tuple[Tensor, None]:
    """Return the norm of all tensors as one vector, [1] float32 on their device."""
    return torch.nn.utils.get_total_norm(chain.from_iterable(lists)).float().view(1), None


def scale_all(_chunk: int, _overflow: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """Multiply the tensors of the second list, which equals the first, by the factor."""
    torch._foreach_mul_(lists[1], factor)
