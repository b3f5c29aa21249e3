"""Process groups: torch.distributed's default group, and Megatron's groups over it."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from sluice.api import Parallelism
from sluice_trainer.distributed.process_group import join
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.model.layout import RowSplit
from sluice_trainer.step.results import reduced

T = TypeVar("T")


def initialize(parallelism: Parallelism, *, seed: int, timeout: timedelta) -> None:
    """Join the default process group and create Megatron's groups.

    Parameters
    ----------
    parallelism
        Sizes of the parallel dimensions.
    seed
        Seed of torch's and Megatron's random generators.
    timeout
        Limit of a collective.

    Raises
    ------
    ValueError
        If the processes cannot be divided into these groups.

    """
    join(timeout)
    model_parallel = parallelism.tensor * parallelism.pipeline * parallelism.context
    if dist.get_world_size() % model_parallel:
        raise ValueError(
            f"{dist.get_world_size()} trainer processes cannot be split into groups of tensor "
            f"({parallelism.tensor}) x pipeline ({parallelism.pipeline}) x context "
            f"({parallelism.context}) = {model_parallel}"
        )
    if dist.get_world_size() // parallelism.pipeline % parallelism.expert:
        raise ValueError(
            f"{dist.get_world_size()} trainer processes / pipeline ({parallelism.pipeline}) cannot "
            f"be split into groups of expert ({parallelism.expert})"
        )
    with megatron_device():
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallelism.tensor,
                pipeline_model_parallel_size=parallelism.pipeline,
                virtual_pipeline_model_parallel_size=parallelism.virtual_pipeline,
                context_parallel_size=parallelism.context,
                expert_model_parallel_size=parallelism.expert,
                expert_tensor_parallel_size=1,
                distributed_timeout_minutes=max(timeout.total_seconds() / 60, 1 / 60),
            )
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Leave all groups. A process that exits without it may block its peers."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def row_split() -> RowSplit:
    """Return how this rank shares a row of tokens with other ranks."""
    return RowSplit(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        rank=parallel_state.get_context_parallel_rank(),
    )


def ranks(timeout: timedelta) -> Ranks:
    """Return this process's position among the trainer's ranks."""
    return Ranks.of_process(
        timeout,
        data_parallel_rank=int(parallel_state.get_data_parallel_rank()),
        data_parallel_size=int(parallel_state.get_data_parallel_world_size()),
    )


def reduce_over_data_parallel(
    values: dict[str, torch.Tensor], op: dist.ReduceOp.RedOpType
) -> dict[str, float]:
    """All-reduce scalars over the data-parallel group (`reduced`).

    Context-parallel ranks of one data-parallel rank hold equal values, which count once.
    """
    return reduced(values, op, parallel_state.get_data_parallel_group())


def from_last_stage(value: T) -> T:
    """Broadcast the last pipeline stage's value: only that stage has losses and log-probs."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(
        box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group
    )
    return box[0]


def largest_over_data_parallel(count: int) -> int:
    """Return the largest of the data-parallel ranks' counts."""
    return int(
        reduce_over_data_parallel({"count": torch.tensor(count)}, dist.ReduceOp.MAX)["count"]
    )
