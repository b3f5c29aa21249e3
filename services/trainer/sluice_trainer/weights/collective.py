"""Broadcasts of buckets, over gloo or NCCL.

One communicator per engine replica (this rank is rank 0, the engine's ranks follow), so that an
engine that dies or hangs concerns nobody else: its communicator is aborted, the others do not
notice. Nobody blocks in a collective: broadcasts are polled, and the engine's HTTP answer is
watched at the same time, under the deadline of the phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _unregister_process_group
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

from sluice_trainer import store
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.transport import Peer, Transport
from sluice_trainer.weights.waiting import both, in_daemon, succeeded, until

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


class Collective(Transport):
    """Broadcasts over one process group per engine.

    While an engine receives and loads a bucket the request for the next one is already with it, if
    it takes them in order; else that goes out once the bucket has gone.
    """

    in_session = True

    def __init__(self, backend: str, host: str, timeout: float, source: str) -> None:
        """source: name and attempt of the sender. An engine remembers the names of groups whose
        sender has died.
        """
        self.source = source
        self.backend = backend
        self.host = host
        self.timeout = timeout
        self._numbers = itertools.count()
        self._groups: dict[str, tuple[int, str, Any]] = {}
        self._requests: dict[str, deque[Request]] = {}
        """Those that an engine has not answered, or that nobody has asked for their answers."""
        self._asked: dict[str, int] = {}
        """Number of the bucket that was asked of an engine last, over the communicator of now."""
        self._turns: dict[str, asyncio.Lock] = {}
        """Broadcasts are queued in the order in which they are asked for."""

    async def prepare(self, peer: Peer) -> None:
        generation, group, _ = self._groups.get(peer.name, (0, "", None))
        if generation == peer.generation:
            return
        self.abandon(peer.name)
        group = f"sluice-{peer.name}-{peer.attempt}-{peer.generation}-{self.source}"
        group += f"-{next(self._numbers)}"
        size = 1 + peer.world_size
        listening = store.listener(self.host)
        port = listening.getsockname()[1]
        engine = asyncio.create_task(
            peer.control.init_group(group, self.host, port, size, self.backend)
        )
        ours = asyncio.create_task(
            in_daemon(lambda: self._join(group, listening, size), self._bury)
        )
        await both(engine, ours)
        self._groups[peer.name] = (peer.generation, group, ours.result())
        self._turns[peer.name] = asyncio.Lock()

    def _join(self, group: str, listening: socket.socket, size: int) -> Any:
        """Our side of a process group outside of torch's default one, as SGLang makes its own."""
        timeout = timedelta(seconds=self.timeout)
        served = store.serve(self.host, listening, size, timeout, wait_for_workers=False)
        name: Any = group  # a type of its own in newer torch, a string for all that it does
        with _without_watchdog() if self.backend == "nccl" else contextlib.nullcontext():
            process_group, _ = _new_process_group_helper(
                size,
                0,
                [],
                Backend(self.backend),
                PrefixStore(group, served),
                group_name=name,
                timeout=timeout,
            )
        _world.pg_group_ranks[process_group] = {rank: rank for rank in range(size)}
        return process_group

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
        asked = self._asked.get(peer.name, -1) if bucket.number else -1
        follows = peer.name in self._groups and asked == bucket.number - 1
        if peer.control.in_order and follows:
            self._ask(peer, bucket, version, flush=flush, onward=onward, piece=piece)

    def _ask(
        self, peer: Peer, bucket: Bucket, version: int, *, flush: bool, onward: str, piece: int
    ) -> Request:
        _, group, _ = self._groups[peer.name]
        receiving = peer.control.receive(
            f"{group}|{onward}|{piece}" if onward else group,
            bucket.names,
            bucket.dtypes,
            bucket.shapes,
            version=version if bucket.last else None,
            flush=flush and bucket.last,
        )
        sending = self._broadcast(bucket, piece if onward else 0, peer.name)
        request = Request(bucket, asyncio.create_task(sending), asyncio.create_task(receiving))
        for task in (request.sent, request.answer):
            task.add_done_callback(succeeded)  # nobody may ask for its failure
        self._asked[peer.name] = bucket.number
        self._requests.setdefault(peer.name, deque()).append(request)
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
        requests = self._requests.setdefault(peer.name, deque())
        request = next((request for request in requests if request.bucket is bucket), None)
        if request is None:
            request = self._ask(peer, bucket, version, flush=flush, onward=onward, piece=piece)
        try:
            await until(request.sent, [each.answer for each in requests])
            while requests and (bucket.last or requests[0] is not request):
                await requests[0].answer
                requests.popleft()
        except BaseException:
            self._forget(peer.name)
            raise

    async def _broadcast(self, bucket: Bucket, piece: int, name: str) -> None:
        """Broadcast in a thread of its own: NCCL makes its communicator in the first one, and waits
        for the peer there. The next bucket is queued behind this one while that is on its way.

        NCCL calls a broadcast that broke off completed, too: whether the engine has the bytes, its
        answers say.
        """
        _, _, process_group = self._groups[name]

        def queue() -> list[Any]:
            with bucket.behind():
                return [
                    dist.broadcast(part, src=0, group=process_group, async_op=True)
                    for part in pieces(bucket.data, piece)
                ]

        async with self._turns[name]:
            works = await in_daemon(queue, dispose=lambda _: None)
        started = time.monotonic()
        while any(work is not None and not work.is_completed() for work in works):
            waited = time.monotonic() - started
            await asyncio.sleep(max(_POLL_SECONDS, waited * _POLL_SHARE))

    def _forget(self, name: str) -> None:
        """Wait for no answer of an engine any more."""
        for request in self._requests.pop(name, ()):
            request.sent.cancel()
            request.answer.cancel()

    def abandon(self, name: str) -> None:
        self._forget(name)
        self._asked.pop(name, None)
        self._turns.pop(name, None)
        _, _, process_group = self._groups.pop(name, (0, "", None))
        if process_group is not None:
            self._bury(process_group)

    def _bury(self, process_group: Any) -> None:
        """Abort a group and have torch forget it. (destroy_process_group would wait for a peer that
        may be dead.)
        """
        tables: tuple[Any, ...] = (
            _world.pg_map,
            _world.pg_names,
            _world.pg_group_ranks,
            _world.pg_backend_config,
            _world.pg_to_tag,
        )
        for table in tables:
            table.pop(process_group, None)
        for groups in _world.tags_to_pg.values():
            if process_group in groups:
                groups.remove(process_group)
        _unregister_process_group(process_group.group_name)
        threading.Thread(target=self._end, args=(process_group,), name="bury", daemon=True).start()

    def _end(self, process_group: Any) -> None:
        """NCCL aborts (0.5 s). gloo cannot: the group's end waits for stuck work until that times
        out. Not here.
        """
        if self.backend == "nccl":
            process_group._get_backend(torch.device("cuda")).abort()
        else:
            time.sleep(self.timeout)


def pieces(data: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Views of a bucket's bytes, each of `size` but the last; 0: one of all."""
    step = size or max(len(data), 1)
    return [data[start : start + step] for start in range(0, max(len(data), 1), step)]


_making_group = threading.Lock()


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Torch's NCCL watchdog ends the whole process when a collective fails. An engine's failure is
    ours to handle.

    The setting is read when a group is made: the trainer's own groups keep their watchdog. It is
    the process's, so NCCL's groups are made one at a time, which waits for nobody: peers meet in
    the first broadcast.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _making_group:
        before = os.environ.get(name)
        os.environ[name] = "0"
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before
