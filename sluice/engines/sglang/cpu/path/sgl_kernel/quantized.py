"""Layers with quantized weights in plain torch.

SGLang has kernels for GPUs and for CPUs with AMX. Here weights are dequantized for each product,
and activations keep their precision, as in SGLang's Marlin kernels for GPUs without FP8. Weights
are kept as SGLang keeps them on GPUs: matrices with a scale for each row are transposed.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def by_blocks(codes: Tensor, scales: Tensor, block: int = 128) -> Tensor:
    """Dequantize [..., rows, columns] with a scale for each block."""
    whole = scales.float().repeat_interleave(block, -2).repeat_interleave(block, -1)
    return codes.float() * whole[..., : codes.shape[-2], : codes.shape[-1]]


def by_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantize [..., rows, columns] with scales [..., rows, 1]."""
    return codes.float() * scales.float()


def _linear(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight.to(x.dtype), bias)


def _experts(
    layer: Any, dispatch_output: Any, config: Any, dequantize: Callable[..., Tensor], scale: str
) -> Any:
    """Compute all experts of a layer as SGLang does on CPUs if they are not quantized."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    weights = {
        f"{kind}_weight": dequantize(
            getattr(layer, f"{kind}_weight"), getattr(layer, f"{kind}_{scale}")
        ).to(x.dtype)
        for kind in ("w13", "w2")
    }
    plain: Any = SimpleNamespace(num_experts=layer.num_experts, **weights)
    return StandardCombineInput(
        hidden_states=moe_forward_native(plain, x, dispatch_output.topk_output, config)
    )


def _as_loaded(method: Any, layer: Any) -> None:
    """Keep the weights as they have been loaded."""


def _transposed(method: Any, layer: Any) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data, requires_grad=False)


def _apply_rows(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return _linear(by_rows(layer.weight.t(), layer.weight_scale), x, bias)


def _remember(method: Any, layer: Any, config: Any) -> None:
    method.moe_runner_config = config


def _with_float32(config: Any) -> None:
    """Let activations be float32, in which CPUs compute."""
    config.get_supported_act_dtypes = lambda *_: [torch.bfloat16, torch.float16, torch.float32]


def _change_blocks(module: Any) -> None:
    """Change layers whose weights are FP8, with a scale for each block."""

    def apply(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _linear(by_blocks(layer.weight, layer.weight_scale_inv), x, bias)

    def apply_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
        config = method.moe_runner_config
        return _experts(layer, dispatch_output, config, by_blocks, "weight_scale_inv")

    _with_float32(module.Fp8Config)
    linear, experts = module.Fp8LinearMethod, module.Fp8MoEMethod
    linear.process_weights_after_loading_block_quant = _as_loaded
    linear.apply = apply
    experts.process_weights_after_loading_block_quant = _as_loaded
    experts.create_moe_runner = _remember
    experts.apply = apply_experts


def _apply_experts_by_rows(method: Any, layer: Any, dispatch_output: Any) -> Any:
    return _experts(layer, dispatch_output, method.moe_runner_config, by_rows, "weight_scale")


def _change_int8(module: Any) -> None:
    """Change layers whose weights are int8, with a scale for each row."""
    _with_float32(module.W8A8Int8Config)
    linear, experts = module.W8A8Int8LinearMethod, module.W8A8Int8MoEMethod
    linear.process_weights_after_loading = _transposed
    linear.apply = _apply_rows
    experts.create_moe_runner = _remember
    experts.apply = _apply_experts_by_rows


def _change_compressed(module: Any) -> None:
    """Accept the schemes below, although there is no GPU."""
    _with_float32(module.CompressedTensorsConfig)
    module.CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True


def _change_fp8_rows(module: Any) -> None:
    """Change layers whose weights are FP8, with a scale for each row."""
    module.CompressedTensorsW8A8Fp8.apply_weights = _apply_rows


def _change_fp8_experts(module: Any) -> None:
    experts = module.CompressedTensorsW8A8Fp8MoE
    experts.create_moe_runner = _remember
    experts.apply_weights = _apply_experts_by_rows


_METHODS = "sglang.srt.layers.quantization"
_SCHEMES = f"{_METHODS}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8"
CHANGES: dict[str, Callable[[Any], None]] = {
    f"{_METHODS}.fp8": _change_blocks,
    f"{_METHODS}.w8a8_int8": _change_int8,
    f"{_METHODS}.compressed_tensors.compressed_tensors": _change_compressed,
    _SCHEMES: _change_fp8_rows,
    f"{_SCHEMES}_moe": _change_fp8_experts,
}
