"""The ranks of a trainer: rank 0 decides, the others hear of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    _control: Any

    @classmethod
    def here(cls, timeout: timedelta, *, data_parallel_rank: int, data_parallel_size: int) -> Ranks:
        """This process' place. Decisions travel over gloo, on GPU machines too: they are small and
        live on the CPU.
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
        """Rank 0's value, on every rank. Fails after the timeout where a rank is missing."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values
