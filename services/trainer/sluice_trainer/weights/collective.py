"""Broadcasts of buckets, over gloo or NCCL.

One communicator per engine replica, so that an engine that dies or hangs concerns nobody else: its
communicator is aborted, the others do not notice. Nobody blocks in a collective: broadcasts are
polled, and the engine's HTTP answer is watched at the same time, under the deadline of the phase.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sluice_trainer.distributed import store
from sluice_trainer.weights import process_group
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.transport import Peer, Transport
from sluice_trainer.weights.waiting import (
    run_in_daemon_thread,
    succeeded,
    wait_for_both,
    wait_until_sent,
)

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
        self.last_requested = -1
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
            with bucket.stream_after_fill():
                return [
                    dist.broadcast(part, src=0, group=self.process_group, async_op=True)
                    for part in pieces(bucket.data, piece)
                ]

        async with self._turn:
            works = await run_in_daemon_thread(queue, dispose=lambda _: None)
        started = time.monotonic()
        while any(work is not None and not work.is_completed() for work in works):
            waited = time.monotonic() - started
            await asyncio.sleep(max(_POLL_SECONDS, waited * _POLL_SHARE))

    def cancel_requests(self) -> None:
        """Wait for no answer of the engine any more."""
        while self.requests:
            request = self.requests.popleft()
            request.sent.cancel()
            request.answer.cancel()


def pieces(data: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Views of a bucket's bytes, each of `size` but the last; 0: one of all."""
    step = size or max(len(data), 1)
    return [data[start : start + step] for start in range(0, max(len(data), 1), step)]


class Collective(Transport):
    """Broadcasts over one communicator per engine.

    While an engine receives and loads a bucket the request for the next one is already with it, if
    it takes them in order; else that goes out once the bucket has gone.
    """

    in_session = True
    in_turn = True

    def __init__(self, backend: str, host: str, timeout: float, source: str) -> None:
        """source: name and attempt of the sender. An engine remembers the names of groups whose
        sender has died.
        """
        self.source = source
        self.backend = backend
        self.host = host
        self.timeout = timeout
        self.communicators: dict[str, Communicator] = {}
        """By the engine's name."""
        self._numbers = itertools.count()

    async def prepare(self, peer: Peer) -> None:
        known = self.communicators.get(peer.name)
        if known and known.generation == peer.generation:
            return
        self.abandon(peer.name)
        name = f"sluice-{peer.name}-{peer.attempt}-{peer.generation}-{self.source}"
        name += f"-{next(self._numbers)}"
        size = 1 + peer.world_size
        listening = store.listener(self.host)
        port = listening.getsockname()[1]
        join = partial(
            process_group.make_group,
            name,
            self.host,
            listening,
            size=size,
            backend=self.backend,
            timeout=self.timeout,
        )
        abort_group = partial(process_group.abort_group, backend=self.backend, timeout=self.timeout)
        engine = asyncio.create_task(
            peer.control.init_group(name, self.host, port, size, self.backend)
        )
        ours = asyncio.create_task(run_in_daemon_thread(join, abort_group))
        await wait_for_both(engine, ours)
        self.communicators[peer.name] = Communicator(peer.generation, name, ours.result())

    def announce(
        self,
        peer: Peer,
        bucket: Bucket,
        version: int,
        *,
        flush: bool,
        onward: str = "",
        piece: int = 0,
    ) -> None:
        known = self.communicators.get(peer.name)
        if known is None or not peer.control.in_order:
            return
        if bucket.number in (0, known.last_requested + 1):  # no earlier one is missing
            self._request(peer, bucket, version, flush=flush, onward=onward, piece=piece)

    def _request(
        self, peer: Peer, bucket: Bucket, version: int, *, flush: bool, onward: str, piece: int
    ) -> Request:
        communicator = self.communicators[peer.name]
        name = communicator.name
        receiving = peer.control.receive(
            f"{name}|{onward}|{piece}" if onward else name,
            bucket.names,
            bucket.dtypes,
            bucket.shapes,
            version=version if bucket.last else None,
            flush=flush and bucket.last,
        )
        sending = communicator.broadcast(bucket, piece if onward else 0)
        request = Request(bucket, asyncio.create_task(sending), asyncio.create_task(receiving))
        for task in (request.sent, request.answer):
            task.add_done_callback(succeeded)  # nobody may ask for its failure
        communicator.last_requested = bucket.number
        communicator.requests.append(request)
        return request

    async def stage(self, bucket: Bucket, version: int) -> None:
        return

    async def send(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        await self.broadcast(peer, bucket, version, flush=flush)

    async def broadcast(
        self,
        peer: Peer,
        bucket: Bucket,
        version: int,
        *,
        flush: bool,
        onward: str = "",
        piece: int = 0,
    ) -> None:
        """Broadcast a bucket to an engine, in pieces of so many bytes, which it passes on over its
        link `onward`. One that was announced comes as that said.
        """
        communicator = self.communicators[peer.name]
        requests = communicator.requests
        request = next((request for request in requests if request.bucket is bucket), None)
        if request is None:
            request = self._request(peer, bucket, version, flush=flush, onward=onward, piece=piece)
        try:
            await wait_until_sent(request.sent, [each.answer for each in requests])
            while requests and (bucket.last or requests[0] is not request):
                await requests[0].answer
                requests.popleft()
            communicator.is_proven = True
        except BaseException:
            communicator.cancel_requests()
            raise

    def is_connecting(self, name: str) -> bool:
        communicator = self.communicators.get(name)
        return communicator is None or not communicator.is_proven

    def abandon(self, name: str) -> None:
        if communicator := self.communicators.pop(name, None):
            communicator.cancel_requests()
            process_group.abort_group(communicator.process_group, self.backend, self.timeout)
