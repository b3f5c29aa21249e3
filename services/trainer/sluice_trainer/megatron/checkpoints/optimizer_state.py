"""Megatron's distributed optimizer in a checkpoint, as each rank has it.

The content and its names are those of Megatron's `fully_reshardable`, which loads under any layout.
Megatron makes it by gathering the whole state in the host memory of every rank, five copies of it
in turn: 10 s for 135M parameters on an H200. Here a parameter's state is written by the rank whose
share begins it, from where it is, and only a parameter that lies on several ranks is put together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

MAIN = "param"
"""Megatron's name of the weights in float32."""


def optimizer_state(optimizer: Any, weights: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Sharded tensors of the parameters that this rank writes, by their numbers. Collective.

    optimizer: a DistributedOptimizer. weights: `sharded_state_dict`s of its model.
    """
    sharded, _ = extract_sharded_tensors_and_factories(weights)
    of_weight = {weight.data: weight for weight in nested_values(sharded)}
    names = (MAIN, *optimizer.optimizer_state_keys)
    rank = optimizer.data_parallel_group.rank()
    state: dict[int, dict[str, Any]] = {}
    for number, (parameter, first, last) in enumerate(_places(optimizer)):
        if first == last and rank != first:
            continue
        tensors = _share(optimizer, parameter, names) if first <= rank <= last else {}
        if first != last:
            tensors = _together(optimizer, parameter, tensors, names)
        if rank == first:
            like = of_weight[parameter]
            state[number] = {name: _sharded(tensors[name], name, like) for name in names}
    return state


def _places(optimizer: Any) -> Iterator[tuple[Tensor, int, int]]:
    """(parameter, first and last of the data-parallel ranks that it lies on), in one order."""
    size = optimizer.data_parallel_group.size()
    for buffer in optimizer.buffers:
        for parameter, (start, end, index) in buffer.param_index_map.items():
            bucket = buffer.buckets[index]
            share = bucket.grad_data.numel() // size
            first, last = start - bucket.offset, end - 1 - bucket.offset
            yield parameter, first // share, last // share


def _share(optimizer: Any, parameter: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The part of a parameter's state that this rank has, [elements]."""
    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    return {name: tensors[name].detach().view(-1) for name in names}


def _together(
    optimizer: Any, parameter: Tensor, share: dict[str, Tensor], names: tuple[str, ...]
) -> dict[str, Tensor]:
    """The whole state of a parameter that lies on several ranks. Collective.

    Bits are added up, as whole numbers: each comes from one rank, and the others have none.
    """
    whole = {}
    for name in names:
        tensor = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if name in share:
            place = optimizer._get_model_param_range_map(parameter)["param"]
            tensor[place.start : place.end] = share[name]
        dist.all_reduce(tensor.view(torch.int32), group=optimizer.data_parallel_group)
        whole[name] = tensor
    return whole


def _sharded(tensor: Tensor, name: str, like: Any) -> Any:
    """The tensor as its weight lies in the model, to be written by this rank."""
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{name}.{like.key}",
        "data": tensor.view(like.data.shape),
        "replica_id": (*like.replica_id[:-1], 0),
    }
    if not isinstance(like, ShardedTensorFactory):
        changes["dtype"] = tensor.dtype
    return replace(like, **changes)
