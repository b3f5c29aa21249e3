"""Loads all experts of a layer from one tensor, in one copy or two.

A checkpoint has three tensors for each expert, and SGLang looks up and copies each of them
separately. A trainer has them stacked. It sends a stack under the name of SGLang's parameter,
`...experts.w13_weight` (gate above up: [experts, 2 * width, hidden]) or `...experts.w2_weight`
(down: [experts, hidden, width]). The last branch of a model's `load_weights` then calls the
parameter's loader with the stack alone, which SGLang itself never does.

A stack may come in parts of equal numbers of experts. A loader gets only the tensor, so the
tensor's dimensions say which part it is: part i has i more of them, of size 1, in front.
"""

from collections.abc import Callable
from typing import Any

from .. import tell_once

LOADER = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader"
Load = Callable[..., None]


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(LOADER, load, HookType.AROUND)


def load(original: Load, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `FusedMoE.weight_loader(param, loaded, name, shard_id, expert_id)`."""
    if len(args) != 2 or kwargs:
        original(layer, *args, **kwargs)
        return
    param, loaded = args
    kind = next(
        (kind for kind in ("w13_weight", "w2_weight") if getattr(layer, kind, None) is param), None
    )
    if kind is None or loaded.ndim < 3:
        raise ValueError(
            f"a tensor {tuple(loaded.shape)} without the number of an expert is none of stacked "
            "experts"
        )
    part, stack = loaded.ndim - 3, loaded.reshape(loaded.shape[-3:])
    first = part * len(stack)
    if _is_plain(layer, kind, param, stack):
        tell_once("stacked experts are copied at once")
        _copy(layer, kind, param.data, stack, first)
        return
    tell_once(
        "stacked experts are loaded one by one, because this engine does not hold them as a "
        "checkpoint does"
    )
    for expert, tensor in enumerate(stack, first):
        shards = (
            {"w2": tensor}
            if kind == "w2_weight"
            else dict(zip(("w1", "w3"), tensor.chunk(2), strict=True))
        )
        for shard, shard_tensor in shards.items():
            original(
                layer,
                param,
                shard_tensor,
                f"{layer.layer_name}.{kind}",
                shard_id=shard,
                expert_id=expert,
            )


def _is_plain(layer: Any, kind: str, param: Any, stack: Any) -> bool:
    """Return True if loading is a copy of this rank's slice.

    That needs weights as they are in the checkpoint, and experts in order. These are the conditions
    that SGLang's loader checks before it copies, as read in 0.5.17 and 0.5.21.
    """
    experts, width, hidden = (
        layer.num_local_experts,
        layer.intermediate_size_per_partition,
        layer.hidden_size,
    )
    shape = (experts, 2 * width, hidden) if kind == "w13_weight" else (experts, hidden, width)
    full = (
        (2 * width * layer.moe_tp_size, hidden)
        if kind == "w13_weight"
        else (hidden, width * layer.moe_tp_size)
    )
    return (
        tuple(param.shape) == shape
        and tuple(stack.shape[1:]) == full
        and layer.quant_config is None
        and type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"
        and not getattr(layer.quant_method, "load_up_proj_weight_first", False)
        and getattr(layer, "scheme", None) is None
        and layer.moe_runner_config.is_gated is True
        and layer.use_presharded_weights is False
        and layer.use_triton_kernels is False
        and layer.use_flashinfer_trtllm_moe is False
        and not getattr(param, "is_transposed", False)
        and not getattr(param, "_sglang_require_global_experts", False)
        and _in_order(layer)
    )


def _in_order(layer: Any) -> bool:
    """Return True if rank r has experts r * n to r * n + n - 1, each once.

    Otherwise there are redundant or moved experts.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    count, place = layer._num_local_routed, layer._map_global_expert_id_to_local_expert_id
    start = layer.moe_ep_rank * count
    if (place(start), place(start + count - 1)) != (0, count - 1):
        return False
    metadata = get_global_expert_location_metadata()
    if metadata is None:
        return True
    places = metadata.physical_to_logical_map_cpu
    return bool(
        layer.layer_id < len(places)
        and places[layer.layer_id].tolist() == [*range(layer._num_global_routed)]
    )


def _copy(layer: Any, kind: str, target: Any, stack: Any, first: int) -> None:
    """Copy this rank's part of experts `first` to `first + len(stack) - 1`.

    After the routed experts a layer may have the shared one, which comes under another name.
    """
    start = layer.moe_ep_rank * layer._num_local_routed
    begin, end = max(first, start), min(first + len(stack), start + layer._num_local_routed)
    if begin >= end:
        return
    ours, theirs = target[begin - start : end - start], stack[begin - first : end - first]
    width, rank = layer.intermediate_size_per_partition, layer.moe_tp_rank
    if kind == "w2_weight":
        ours.copy_(theirs.narrow(2, rank * width, width))
        return
    for mine, all_ranks in zip(ours.chunk(2, 1), theirs.chunk(2, 1), strict=True):
        mine.copy_(all_ranks.narrow(1, rank * width, width))
