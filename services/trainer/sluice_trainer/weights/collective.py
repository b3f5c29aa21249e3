"""Transport by broadcasts over gloo or NCCL.

Each engine replica has its own communicator, so an engine that dies or hangs does not affect the
others: its communicator is aborted. No thread blocks in a collective: broadcasts are polled, and
the engine's HTTP answer is awaited at the same time, under the deadline of the phase.
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
# Interval of polls as a fraction of the time since the broadcast began. With many engines each
# broadcast waits for the link, and frequent polls would keep the event loop busy.
_POLL_SHARE = 0.05


class Request(NamedTuple):
    """A request to an engine to take part in the broadcast of a bucket.

    Attributes
    ----------
    bucket
        The bucket.
    sent
        Done once the bucket has been broadcast.
    answer
        Done once the engine reports that it has the bucket.

    """

    bucket: Bucket
    sent: asyncio.Task[None]
    answer: asyncio.Task[None]


class Communicator:
    """A communicator with one engine replica, and its requests in flight.

    The trainer is rank 0, and the engine's ranks follow. Broadcasts are polled, so no thread
    blocks.
    """

    def __init__(self, generation: int, name: str, process_group: Any) -> None:
        """Wrap a process group.

        generation: the engine's. name: name of the group on both sides.
        """
        self.generation = generation
        self.name = name
        self.process_group = process_group
        # Requests that the engine has not answered, or whose answers have not been awaited.
        self.requests: deque[Request] = deque()
        # Number of the bucket that was requested last.
        self.last_requested = -1
        # True once a bucket has arrived: NCCL creates its communicator in the first broadcast.
        self.is_proven = False
        # Broadcasts are queued in the order of their requests.
        self._turn = asyncio.Lock()

    async def broadcast(self, bucket: Bucket, piece: int) -> None:
        """Broadcast a bucket in pieces of `piece` bytes (0: in one piece).

        The call runs in a separate thread, because NCCL creates its communicator in the first
        broadcast and waits for the peer there. The next bucket is queued behind this one while it
        is being sent. NCCL also reports an aborted broadcast as completed; only the engine's answer
        says whether it has the bytes.
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
        """Cancel all requests to the engine."""
        while self.requests:
            request = self.requests.popleft()
            request.sent.cancel()
            request.answer.cancel()


def pieces(data: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Split a bucket's bytes into views of `size` bytes (0: one view of all)."""
    step = size or max(len(data), 1)
    return [data[start : start + step] for start in range(0, max(len(data), 1), step)]


class Collective(Transport):
    """Broadcasts over one communicator per engine.

    An engine that takes requests in order has the request for the next bucket while it receives and
    loads the current one. Other engines get it once the current bucket has been sent.
    """

    in_session = True
    in_turn = True

    def __init__(
        self, backend: str, host: str, timeout: float, source: str, *, tag: str = ""
    ) -> None:
        """Create a transport without communicators.

        Parameters
        ----------
        backend
            `nccl` or `gloo`.
        host
            Address of this rank.
        timeout
            Seconds that an operation may take.
        source
            Name and attempt of the sender; part of the groups' names, because an engine remembers
            the names of groups whose sender has died.
        tag
            Start of the groups' names in engines of a pool, which tells whose they are.

        """
        self._tag = tag
        self.source = source
        self.backend = backend
        self.host = host
        self.timeout = timeout
        # Communicators by name of the engine.
        self.communicators: dict[str, Communicator] = {}
        self._numbers = itertools.count()

    async def prepare(self, peer: Peer) -> None:
        existing = self.communicators.get(peer.name)
        if existing and existing.generation == peer.generation:
            return
        self.abandon(peer.name)
        source = f"{peer.attempt}-{peer.generation}-{self.source}"
        name = f"sluice-{self._tag}{peer.name}-{source}"
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
        trainer = asyncio.create_task(run_in_daemon_thread(join, abort_group))
        await wait_for_both(engine, trainer)
        self.communicators[peer.name] = Communicator(peer.generation, name, trainer.result())

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
        communicator = self.communicators.get(peer.name)
        if communicator is None or not peer.control.in_order:
            return
        if bucket.number in (0, communicator.last_requested + 1):  # no earlier one is missing
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
            # Retrieves the exception: asyncio logs one that is never retrieved.
            task.add_done_callback(succeeded)
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
        """Broadcast a bucket to an engine; one that was announced is sent as announced.

        Parameters
        ----------
        peer
            The engine.
        bucket
            The bucket.
        version
            Weight version of the update.
        flush
            The engine empties its prefix cache after the last bucket.
        onward
            Name of the link over which the engine relays the bucket; empty if it does not.
        piece
            Bytes of a piece of a relayed bucket.

        """
        communicator = self.communicators[peer.name]
        requests = communicator.requests
        request = next((request for request in requests if request.bucket is bucket), None)
        if request is None:
            request = self._request(peer, bucket, version, flush=flush, onward=onward, piece=piece)
        try:
            await wait_until_sent(request.sent, [request.answer for request in requests])
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
