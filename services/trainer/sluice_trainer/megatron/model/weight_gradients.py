"""Gradients of weights, which the product that makes them adds to their sum in float32.

Megatron leaves that to an extension of Apex (`gradient_accumulation_fusion`). Without it a product
in bf16 is written, read again and added by another kernel, and what each micro-batch brings is
rounded to bf16 first. torch has the product since 2.8, cuBLAS's; here it stands in for the
extension, under the name that Megatron calls.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import layers


def add_weight_gradient(inputs: Tensor, gradients: Tensor, total: Tensor) -> None:
    """Add the product of gradients [n, out], transposed, and inputs [n, in] to total [out, in].

    The total is float32. So is the product inside, also where both others are bf16.
    """
    if total.is_cuda and inputs.dtype != total.dtype:
        torch.addmm(total, gradients.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(gradients.t().to(total.dtype), inputs.to(total.dtype))


def separate(module: Any) -> None:
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
