"""A replacement of SGLang's CPU kernels, of which PyPI has no build.

SGLang imports the names below when its CPU engine starts, though only speculative decoding calls
the functions, and models with linear attention (Qwen3.5) the operators. All that other models need
has a path in plain torch, which SGLang takes because this package registers no AMX operators.
"""

from typing import Any, NoReturn

import torch

# Operators that files of models bind when they are imported. SGLang imports the files of a whole
# family for the images of one model, so each must be there.
_BOUND_OPERATORS = (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)


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

_library: Any = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
for _operator in _BOUND_OPERATORS:
    _library.define(f"{_operator}() -> ()")
