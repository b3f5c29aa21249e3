"""A replacement of SGLang's CPU kernels, of which PyPI has no build.

SGLang imports the names below when its CPU engine starts, though only speculative decoding calls
them, and operators when it imports the files of Qwen3.5, which calls them (`mamba`). All that other
models need has a path in plain torch, which SGLang takes because this package has no AMX operators.
"""

import importlib.abc
import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

import torch

from . import mamba

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


class _GatedNormOnCpu(importlib.abc.MetaPathFinder):
    """Lets SGLang's gated norm call the operator, which it does on CPUs with AMX only."""

    module = "sglang.kernels.ops.attention.fla.layernorm_gated"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_choose(module: ModuleType) -> None:
            execute(module)
            module._use_cpu = True  # type: ignore[attr-defined]

        spec.loader.exec_module = execute_and_choose  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _GatedNormOnCpu())


def _missing(name: str) -> Any:
    def kernel(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no CPU build of SGLang's kernels")

    return kernel


copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")
assign_req_to_token_pool_cpu = _missing("assign_req_to_token_pool_cpu")
assign_extend_cache_locs_cpu = _missing("assign_extend_cache_locs_cpu")
assign_draft_cache_locs_contiguous_cpu = _missing("assign_draft_cache_locs_contiguous_cpu")
build_tree_kernel_efficient_cpu = _missing("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = _missing("verify_tree_greedy_cpu")
fill_accept_out_cache_loc_cpu = _missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _missing("fill_bonus_tokens_cpu")
