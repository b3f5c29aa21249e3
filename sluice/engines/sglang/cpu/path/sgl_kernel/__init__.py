"""A replacement of SGLang's CPU kernels, of which PyPI has no build.

SGLang imports the names below when its CPU engine starts, though only speculative decoding calls
them, and operators when it imports the files of Qwen3.5, which calls them (`mamba`). Layers with
quantized weights get methods in plain torch (`quantized`). All that other models need has a path in
plain torch, which SGLang takes because this package has no AMX operators.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch

from . import mamba, quantized, speculative
from .speculative import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    top_k_renorm_prob,
    top_p_renorm_prob,
    tree_speculative_sampling_target_only,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy_cpu",
]

# Operators that files of models bind when they are imported. SGLang imports the files of a whole
# family for the images of one model, so each must be there.
for _operator in (
    mamba.fused_gdn_gating_cpu,
    mamba.fused_qk_gemma_rmsnorm_cpu,
    mamba.fused_rmsnorm_gated_cpu,
    mamba.fused_qk_gemma_rmsnorm_with_gate_cpu,
    mamba.fused_qkvzba_split_reshape_cat_contiguous_cpu,
    mamba.fused_sigmoid_gating_delta_rule_update_cpu,
    mamba.fused_sigmoid_mul_cpu,
):
    setattr(torch.ops.sgl_kernel, _operator.__name__, _operator)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes a module of SGLang as soon as it is imported."""

    def __init__(self, module: str, change: Callable[[ModuleType], None]) -> None:
        self._module, self._change = module, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _call_gated_norm(module: Any) -> None:
    """Let the gated norm call the operator, which SGLang does on CPUs with AMX only."""
    module._use_cpu = True


def _absorb_latent_attention(module: Any) -> None:
    """Let latent attention use the compressed keys in prompts too, as in decoding.

    For plain torch SGLang has no other path: it would look up whole keys in the compressed cache.
    """
    module.AttentionBackendRegistry.register(
        "torch_native", lambda layer, batch: module.AttnForwardMethod.MLA
    )


def _gate_in_torch(module: Any) -> None:
    """Replace the Triton kernel that gates the shared expert of Qwen's mixtures."""

    def fused_gate_sigmoid_mul_add(
        states: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, output: torch.Tensor
    ) -> None:
        gate = (states.float() @ weight.float()).sigmoid()[:, None]
        output.add_((shared.float() * gate).to(output.dtype))

    module.fused_gate_sigmoid_mul_add = fused_gate_sigmoid_mul_add


def _norm_in_torch(module: Any) -> None:
    """Replace the Triton kernels of MiniMax-M2's norms of all queries and all keys of a token."""

    def rms_sumsq_serial(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.float().square().sum(-1) for x in (first, second)])

    def rms_apply_serial(
        first: torch.Tensor,
        second: torch.Tensor,
        first_weight: torch.Tensor,
        second_weight: torch.Tensor,
        squares: torch.Tensor,
        ranks: int,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(
            (x.float() * (sums / (x.shape[-1] * ranks) + eps).rsqrt()[:, None] * weight).to(x.dtype)
            for x, weight, sums in (
                (first, first_weight, squares[0]),
                (second, second_weight, squares[1]),
            )
        )

    module.rms_sumsq_serial, module.rms_apply_serial = rms_sumsq_serial, rms_apply_serial


for _module, _change in (
    ("sglang.kernels.ops.attention.fla.fused_norm_gate", _call_gated_norm),
    ("sglang.srt.models.minimax_m2", _norm_in_torch),
    ("sglang.kernels.ops.elementwise.elementwise", _gate_in_torch),
    ("sglang.kernels.ops.attention.fla.layernorm_gated", _call_gated_norm),
    (
        "sglang.srt.models.deepseek_common.attention_backend_handler",
        _absorb_latent_attention,
    ),
    *quantized.CHANGES.items(),
    *speculative.CHANGES.items(),
):
    sys.meta_path.insert(0, _AfterImport(_module, _change))


def _missing(name: str) -> Any:
    def kernel(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no CPU build of SGLang's kernels")

    return kernel


copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")
