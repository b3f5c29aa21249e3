"""The buffer as a worker uses it: leases, heartbeats, and a stream of groups in each direction.

Streams are opened again when the buffer restarts.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from sluice.samples.sample import SampleGroup
from sluice.telemetry import logs
from sluice.wire import codec, rpc
from sluice.wire.buffer_locator import BufferLocator
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc
from sluice.wire.v1 import common_pb2 as common

T = TypeVar("T")

CALL_SECONDS = 30.0
# Longest wait for a buffer that is away. After it the worker gives up and is restarted.
PATIENCE_SECONDS = 600.0

_REOPEN_SECONDS = (0.2, 10.0)
# A repetition of the call cannot help. RESOURCE_EXHAUSTED is not listed: a full buffer has room
# after the next checkpoint.
_FINAL_CODES = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
)


class BufferClient:
    """The calls of a worker to the buffer."""

    def __init__(self, rendezvous: str, caller: pb.Caller) -> None:
        self.locator = BufferLocator(rendezvous)
        self._caller = caller
        self._calls, self._session = itertools.count(1), secrets.randbits(64)

    @property
    def worker(self) -> str:
        """Name of the worker that calls."""
        return str(self._caller.name)

    async def close(self) -> None:
        await self.locator.close()

    async def lease(
        self, max_groups: int, version: int, wait_seconds: float, held: Callable[[], list[pb.Lease]]
    ) -> tuple[list[pb.LeasedGroup], bool]:
        """Lease groups; return them, and True once no prompt will ever come.

        Parameters
        ----------
        max_groups
            Most groups that the worker has room for.
        version
            Weight version of the worker's engine.
        wait_seconds
            Time that an empty buffer waits for prompts.
        held
            Returns all leases that the worker has in work when a call is made. If an answer is lost
            on its way, the leases that the worker does not hold come again with the next answer.

        """

        async def call() -> tuple[list[pb.LeasedGroup], bool]:
            stub = await self.locator.stub(PATIENCE_SECONDS)
            request = pb.LeasePromptsRequest(
                worker=self._caller,
                max_groups=max_groups,
                version=version,
                wait_seconds=wait_seconds,
                request=next(self._calls),
                session=self._session,
                held=held(),
            )
            try:
                return await _leases(
                    stub.LeasePrompts(request, metadata=rpc.metadata()),
                    wait_seconds + CALL_SECONDS,
                )
            except rpc.SilentPeerError:
                self.locator.lost(stub)
                raise
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    self.locator.lost(stub)
                    raise
                logs.get().warning("the buffer is full", details=error.details())
                await asyncio.sleep(_REOPEN_SECONDS[1])
                return [], False

        return await rpc.retrying(call, what="LeasePrompts at the buffer", seconds=PATIENCE_SECONDS)

    async def heartbeat(self, leases: list[pb.Lease]) -> list[pb.Lease]:
        """Extend leases; return those to drop.

        Returns no leases if the buffer is away: it extends them all when it is back.
        """
        request = pb.HeartbeatRequest(worker=self._caller, leases=leases)
        try:
            stub = await self.locator.stub(CALL_SECONDS)
            try:
                answer = await stub.Heartbeat(
                    request, metadata=rpc.metadata(), timeout=CALL_SECONDS
                )
            except grpc.aio.AioRpcError as error:
                self.locator.lost(stub)
                logs.get().warning(
                    "heartbeat failed", code=error.code().name, details=error.details()
                )
                return []
            return list(answer.drop)
        except (rpc.DeadlineError, rpc.RefusedError) as error:
            logs.get().warning("heartbeat failed", error=str(error))
            return []

    def submit_stream(
        self, chunks: AsyncIterator[common.Chunk]
    ) -> AsyncIterator[pb.SubmitResponse]:
        return self._stream(lambda stub: stub.Submit(chunks, metadata=rpc.metadata()))

    def return_stream(
        self, chunks: AsyncIterator[common.Chunk]
    ) -> AsyncIterator[pb.ReturnResponse]:
        return self._stream(lambda stub: stub.Return(chunks, metadata=rpc.metadata()))

    async def _stream(
        self, open_: Callable[[buffer_pb2_grpc.BufferStub], AsyncIterator[T]]
    ) -> AsyncIterator[T]:
        stub = await self.locator.stub(PATIENCE_SECONDS)
        try:
            async for answer in open_(stub):
                yield answer
        except grpc.aio.AioRpcError:
            self.locator.lost(stub)
            raise


async def _leases(answers: Any, seconds: float) -> tuple[list[pb.LeasedGroup], bool]:
    """Read the groups of an answer of any size. Each piece has to come within `seconds`."""
    assembler, exhausted = codec.Assembler(), False
    groups: list[pb.LeasedGroup] = []
    while True:
        try:
            async with asyncio.timeout(seconds):
                answer = await answers.read()
        except TimeoutError:
            answers.cancel()
            raise rpc.SilentPeerError(f"no piece of the answer came for {seconds:.0f} s") from None
        if answer is grpc.aio.EOF:
            return groups, exhausted
        exhausted = answer.exhausted
        data = assembler.add(answer.group) if answer.HasField("group") else None
        if data is not None:
            groups.append(pb.LeasedGroup.FromString(data))


Answer = pb.SubmitResponse | pb.ReturnResponse
# Ends a queue of keys, which count from 1.
_END = 0


class Outbox:
    """Sends groups over one stream and waits for their answers.

    If the stream breaks, groups without an answer are sent again.
    """

    def __init__(
        self, open_stream: Callable[[AsyncIterator[common.Chunk]], AsyncIterator[Answer]]
    ) -> None:
        self._open = open_stream
        self._keys = itertools.count(1)
        self._unanswered: dict[int, tuple[bytes, asyncio.Future[Answer]]] = {}
        self._queue: asyncio.Queue[int] = asyncio.Queue()

    async def send(self, group: SampleGroup) -> Answer:
        """Send a group; return the buffer's answer once the group is on disk there."""
        key = next(self._keys)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._unanswered[key] = (codec.group_to_message(group).SerializeToString(), future)
        self._queue.put_nowait(key)
        try:
            return await future
        finally:  # a cancelled group is not sent again
            self._unanswered.pop(key, None)

    async def run(self) -> None:
        """Keep the stream open until this task is cancelled.

        Raises RefusedError if the buffer will never accept the stream.
        """
        pause = _REOPEN_SECONDS[0]
        while True:
            queue = self._queue = asyncio.Queue()
            for key in self._unanswered:
                self._queue.put_nowait(key)
            try:
                async for answer in self._open(self._chunks(queue)):
                    pause = _REOPEN_SECONDS[0]
                    _, future = self._unanswered.pop(answer.key, (b"", None))
                    if future and not future.done():
                        future.set_result(answer)
            except grpc.aio.AioRpcError as error:
                if error.code() in _FINAL_CODES:
                    raise rpc.refused("the buffer", error) from error
                logs.get().warning(
                    "stream to the buffer broke", code=error.code().name, details=error.details()
                )
            except rpc.DeadlineError as error:
                logs.get().warning("the buffer is away", error=str(error))
            finally:
                queue.put_nowait(_END)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _REOPEN_SECONDS[1])

    async def _chunks(self, queue: asyncio.Queue[int]) -> AsyncIterator[common.Chunk]:
        """Yield pieces of queued groups until the stream has broken.

        gRPC's task that reads here would otherwise wait for ever.
        """
        while (key := await queue.get()) != _END:
            if key in self._unanswered:
                for chunk in codec.to_chunks(key, self._unanswered[key][0]):
                    yield chunk
