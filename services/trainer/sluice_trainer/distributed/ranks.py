"""The ranks of a trainer, and how they agree: rank 0 decides and broadcasts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process, among all and among the data-parallel ranks."""

    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    _control: Any

    @classmethod
    def of_process(
        cls, timeout: timedelta, *, data_parallel_rank: int, data_parallel_size: int
    ) -> Ranks:
        """Return the ranks of this process, with a process group for decisions.

        The group uses gloo also on GPU machines, because decisions are small and on the CPU.
        """
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            _control=dist.new_group(backend="gloo", timeout=timeout)
            if dist.get_world_size() > 1
            else None,
        )

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank; fails after the timeout if a rank is missing."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values
