"""Broadcasts of buckets, over gloo or NCCL.

One communicator per engine replica, so that an engine that dies or hangs concerns nobody else: its
communicator is aborted, the others do not notice. Nobody blocks in a collective: broadcasts are
polled, and the engine's HTTP answer is watched at the same time, under the deadline of the phase.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

from sluice_trainer.distributed import store
from sluice_trainer.weights import process_group
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.communicator import Communicator, Request
from sluice_trainer.weights.transport import Peer, Transport
from sluice_trainer.weights.waiting import both, in_daemon, succeeded, until


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
            process_group.join,
            name,
            self.host,
            listening,
            size=size,
            backend=self.backend,
            timeout=self.timeout,
        )
        bury = partial(process_group.bury, backend=self.backend, timeout=self.timeout)
        engine = asyncio.create_task(
            peer.control.init_group(name, self.host, port, size, self.backend)
        )
        ours = asyncio.create_task(in_daemon(join, bury))
        await both(engine, ours)
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
        if bucket.number in (0, known.asked + 1):  # no earlier one is missing
            self._ask(peer, bucket, version, flush=flush, onward=onward, piece=piece)

    def _ask(
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
        communicator.asked = bucket.number
        communicator.requests.append(request)
        return request

    async def stage(self, bucket: Bucket, version: int) -> None:
        return

    async def send(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        await self.bring(peer, bucket, version, flush=flush)

    async def bring(
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
            request = self._ask(peer, bucket, version, flush=flush, onward=onward, piece=piece)
        try:
            await until(request.sent, [each.answer for each in requests])
            while requests and (bucket.last or requests[0] is not request):
                await requests[0].answer
                requests.popleft()
            communicator.is_proven = True
        except BaseException:
            communicator.forget()
            raise

    def is_connecting(self, name: str) -> bool:
        communicator = self.communicators.get(name)
        return communicator is None or not communicator.is_proven

    def abandon(self, name: str) -> None:
        if communicator := self.communicators.pop(name, None):
            communicator.forget()
            process_group.bury(communicator.process_group, self.backend, self.timeout)
