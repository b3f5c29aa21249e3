"""State of Megatron's distributed optimizer in a checkpoint, without gathering all of it.

Content and names are those of Megatron's `fully_reshardable`, which loads in any layout. To write
it, Megatron gathers the whole state in the host memory of every rank, in five copies one after
another, and to load it, it reads all of it there. Here the rank whose share begins a parameter
writes its state, and ranks load only parameters that they hold a part of; only parameters that span
several ranks are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# Megatron's name of the float32 weights.
MAIN = "param"


def state_to_write(optimizer: Any, weights: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return sharded tensors of the parameters that this rank writes, by number. Collective.

    Parameters
    ----------
    optimizer
        A DistributedOptimizer.
    weights
        `sharded_state_dict`s of its model.

    """
    rank, like = optimizer.data_parallel_group.rank(), _by_weight(weights)
    state: dict[int, dict[str, Any]] = {}
    for number, (parameter, first, last) in enumerate(_parameter_ranks(optimizer)):
        if first == last and rank != first:
            continue
        tensors = _share(optimizer, parameter) if first <= rank <= last else {}
        if first != last:
            tensors = _gather_state(optimizer, parameter, tensors)
        if rank == first:
            state[number] = {
                name: _sharded(tensor, name, like[parameter], 0) for name, tensor in tensors.items()
            }
    return state


def state_to_load(
    optimizer: Any, weights: dict[str, Any], stored: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return empty host tensors for the whole parameters that this rank holds a part of.

    stored: table of contents of the checkpoint, which determines the types of the moments.
    """
    rank, like = optimizer.data_parallel_group.rank(), _by_weight(weights)
    return {
        number: {
            name: _sharded(
                torch.empty(parameter.numel(), dtype=_dtype(stored, name, like[parameter])),
                name,
                like[parameter],
                rank - first,
            )
            for name in _names(optimizer)
        }
        for number, (parameter, first, last) in enumerate(_parameter_ranks(optimizer))
        if first <= rank <= last
    }


def take_state(optimizer: Any, tensors: dict[int, dict[str, Tensor]]) -> None:
    """Copy this rank's part of loaded tensors into the optimizer, in the optimizer's types."""
    rank = optimizer.data_parallel_group.rank()
    for number, (parameter, first, last) in enumerate(_parameter_ranks(optimizer)):
        if not first <= rank <= last:
            continue
        held = optimizer._get_model_param_range_map(parameter)["param"]
        for name, share in _share(optimizer, parameter).items():
            share.copy_(tensors[number][name].view(-1)[held.start : held.end])


def whole_state(optimizer: Any) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state of each parameter, [elements], on every data-parallel rank. Collective."""
    rank = optimizer.data_parallel_group.rank()
    return {
        parameter: _gather_state(
            optimizer, parameter, _share(optimizer, parameter) if first <= rank <= last else {}
        )
        for parameter, first, last in _parameter_ranks(optimizer)
    }


def set_whole_state(optimizer: Any, moments: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Set this rank's share of the moments of each parameter."""
    rank = optimizer.data_parallel_group.rank()
    for parameter, first, last in _parameter_ranks(optimizer):
        if first <= rank <= last:
            held = optimizer._get_model_param_range_map(parameter)["param"]
            share = _share(optimizer, parameter)
            for name, tensor in moments[parameter].items():
                share[name].copy_(tensor.view(-1)[held.start : held.end])


def _dtype(stored: Mapping[str, Any], name: str, like: Any) -> torch.dtype:
    """Return the stored type; float32 for a missing tensor, which Megatron then reports."""
    entry = stored.get(_key(name, like))
    return entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else torch.float32


def _key(name: str, like: Any) -> str:
    return f"optimizer.state.{name}.{like.key}"


def _by_weight(weights: dict[str, Any]) -> dict[Tensor, Any]:
    sharded, _ = extract_sharded_tensors_and_factories(weights)
    return {weight.data: weight for weight in nested_values(sharded)}


def _names(optimizer: Any) -> tuple[str, ...]:
    return (MAIN, *optimizer.optimizer_state_keys)


def _parameter_ranks(optimizer: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Yield each parameter with the first and last data-parallel rank that hold it."""
    size = optimizer.data_parallel_group.size()
    for buffer in optimizer.buffers:
        for parameter, (start, end, index) in buffer.param_index_map.items():
            bucket = buffer.buckets[index]
            share = bucket.grad_data.numel() // size
            first, last = start - bucket.offset, end - 1 - bucket.offset
            yield parameter, first // share, last // share


def _share(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return the part of a parameter's state that this rank holds, [elements]."""
    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    return {name: tensors[name].detach().view(-1) for name in _names(optimizer)}


def _gather_state(optimizer: Any, parameter: Tensor, share: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole state of a parameter that spans several ranks. Collective.

    It sums bit patterns as 32-bit integers: each element comes from one rank, and is 0 on the
    others.
    """
    whole, size = {}, parameter.numel()
    for name, dtype in _dtypes(optimizer).items():
        # An even number of elements, so that bf16 can be viewed as 32-bit integers.
        tensor = torch.zeros(size + size % 2, dtype=dtype, device=parameter.device)
        if name in share:
            held = optimizer._get_model_param_range_map(parameter)["param"]
            tensor[held.start : held.end] = share[name]
        dist.all_reduce(tensor.view(torch.int32), group=optimizer.data_parallel_group)
        whole[name] = tensor[:size]
    return whole


def _dtypes(optimizer: Any) -> dict[str, torch.dtype]:
    group = optimizer.optimizer.param_groups[0]
    kinds = {name: group.get(f"{name}_dtype", torch.float32) for name in _names(optimizer)}
    return kinds | {MAIN: torch.float32}


def _sharded(tensor: Tensor, name: str, like: Any, replica: int) -> Any:
    """Return the tensor sharded as its weight. replica: 0 on the rank that writes it."""
    changes: dict[str, Any] = {
        "key": _key(name, like),
        "data": tensor.view(like.data.shape),
        "replica_id": (*like.replica_id[:-1], replica),
    }
    if not isinstance(like, ShardedTensorFactory):
        changes["dtype"] = tensor.dtype
    return replace(like, **changes)
