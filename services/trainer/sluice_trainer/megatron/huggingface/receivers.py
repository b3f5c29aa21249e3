"""The ranks for which full tensors are gathered: those that send them to engines.

Most ranks of a large trainer send to no engine. What they have of a tensor is wanted; the whole of
it would cost their links as much as the engines', and memory for nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True, slots=True)
class Wanted:
    """flags: for each rank, True where it or another stage of its pipeline gets full tensors: what
    one stage holds comes to the others through their pipeline.
    """

    flags: tuple[bool, ...]

    @property
    def here(self) -> bool:
        """True where this rank has to do with full tensors."""
        return self.flags[dist.get_rank()]

    def takers(self, group: dist.ProcessGroup) -> list[int]:
        """The ranks of a group that gather its tensors, by their global numbers."""
        return [rank for rank in dist.get_process_group_ranks(group) if self.flags[rank]]


def wanted(receivers: Collection[int] | None) -> Wanted:
    """The ranks that gather, where these get all tensors (None: all do). Collective unless all
    do.
    """
    size = dist.get_world_size()
    if receivers is None:
        return Wanted((True,) * size)
    pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    flags: list[bool] = [False] * size
    dist.all_gather_object(flags, any(rank in receivers for rank in pipeline))
    return Wanted(tuple(flags))
