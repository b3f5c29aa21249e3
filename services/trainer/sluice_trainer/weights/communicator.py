"""A communicator with one engine replica, and what is on its way there. This rank is rank 0, the
engine's ranks follow.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.waiting import in_daemon

_POLL_SECONDS = 0.0005
_POLL_SHARE = 0.05
"""Of the time that a broadcast takes, the time between two looks at it: with many engines each
waits for its turn on the link, and looks are what the event loop would be busy with."""


class Request(NamedTuple):
    """An engine is asked to take part in the broadcast of a bucket. sent: done once that has gone;
    answer: once the engine says that it has it.
    """

    bucket: Bucket
    sent: asyncio.Task[None]
    answer: asyncio.Task[None]


class Communicator:
    """Broadcasts over a process group. Nobody blocks in one: they are polled."""

    def __init__(self, generation: int, name: str, process_group: Any) -> None:
        """generation: of the engine that is at the other end; name: of the group, at both."""
        self.generation = generation
        self.name = name
        self.process_group = process_group
        self.requests: deque[Request] = deque()
        """Those that the engine has not answered, or that nobody has asked for their answers."""
        self.asked = -1
        """Number of the bucket that the engine was asked for last."""
        self.is_proven = False
        """True once a bucket has come over it: NCCL makes it in the first broadcast."""
        self._turn = asyncio.Lock()
        """Broadcasts are queued in the order in which they are asked for."""

    async def broadcast(self, bucket: Bucket, piece: int) -> None:
        """Broadcast in a thread of its own: NCCL makes its communicator in the first one, and waits
        for the peer there. The next bucket is queued behind this one while that is on its way.

        NCCL calls a broadcast that broke off completed, too: whether the engine has the bytes, its
        answers say. piece: bytes of one broadcast; 0: all of them.
        """

        def queue() -> list[Any]:
            with bucket.behind():
                return [
                    dist.broadcast(part, src=0, group=self.process_group, async_op=True)
                    for part in pieces(bucket.data, piece)
                ]

        async with self._turn:
            works = await in_daemon(queue, dispose=lambda _: None)
        started = time.monotonic()
        while any(work is not None and not work.is_completed() for work in works):
            waited = time.monotonic() - started
            await asyncio.sleep(max(_POLL_SECONDS, waited * _POLL_SHARE))

    def forget(self) -> None:
        """Wait for no answer of the engine any more."""
        while self.requests:
            request = self.requests.popleft()
            request.sent.cancel()
            request.answer.cancel()


def pieces(data: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Views of a bucket's bytes, each of `size` but the last; 0: one of all."""
    step = size or max(len(data), 1)
    return [data[start : start + step] for start in range(0, max(len(data), 1), step)]
