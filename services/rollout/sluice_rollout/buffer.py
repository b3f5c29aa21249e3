"""The buffer as a worker uses it: leases, heartbeats, and one stream for each direction that survives restarts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import grpc.aio

from sluice.sample import SampleGroup
from sluice.telemetry import logs
from sluice.wire import codec, membership, rpc
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc
from sluice.wire.v1 import common_pb2 as common

CALL_SECONDS = 30.0
PATIENCE_SECONDS = 600.0
"""How long a worker waits for a buffer that is away before it gives up and is restarted."""

_REOPEN_SECONDS = 0.5


class BufferClient:
    """Follows the buffer to its new address when it was restarted elsewhere."""

    def __init__(self, rendezvous: str, caller: pb.Caller) -> None:
        self._rendezvous = rendezvous
        self._caller = caller
        self._channel: grpc.aio.Channel | None = None
        self._address = ""
        self.stub: buffer_pb2_grpc.BufferStub | None = None

    async def connect(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Find the buffer; a new channel only where its address has changed."""
        member = (await membership.find(self._rendezvous, "buffer", seconds=seconds))[0]
        if member.address != self._address:
            await self.close()
            self._address = member.address
            self._channel = rpc.channel(member.address)
            self.stub = buffer_pb2_grpc.BufferStub(self._channel)

    async def close(self) -> None:
        if self._channel:
            await self._channel.close()
            self._channel, self._address = None, ""

    async def lease(self, max_groups: int, version: int, wait_seconds: float) -> pb.LeasePromptsResponse:
        request = pb.LeasePromptsRequest(
            worker=self._caller, max_groups=max_groups, version=version, wait_seconds=wait_seconds
        )

        async def call() -> pb.LeasePromptsResponse:
            await self.connect()
            assert self.stub
            answer: pb.LeasePromptsResponse = await self.stub.LeasePrompts(
                request, metadata=rpc.metadata(), timeout=wait_seconds + CALL_SECONDS
            )
            return answer

        return await rpc.retrying(call, what="LeasePrompts at the buffer", seconds=PATIENCE_SECONDS)

    async def heartbeat(self, leases: list[pb.Lease]) -> list[pb.Lease]:
        """Extend leases; answers those to drop. A buffer that is away is no news: it extends them when it is back."""
        try:
            await self.connect(seconds=CALL_SECONDS)
            assert self.stub
            request = pb.HeartbeatRequest(worker=self._caller, leases=leases)
            answer = await self.stub.Heartbeat(request, metadata=rpc.metadata(), timeout=CALL_SECONDS)
            return list(answer.drop)
        except (grpc.aio.AioRpcError, rpc.DeadlineError) as error:
            logs.get().warning("heartbeat failed", error=str(error).splitlines()[0])
            return []

    async def submit_stream(self, chunks: AsyncIterator[common.Chunk]) -> AsyncIterator[pb.SubmitResponse]:
        await self.connect()
        assert self.stub
        async for answer in self.stub.Submit(chunks, metadata=rpc.metadata()):
            yield answer

    async def return_stream(self, chunks: AsyncIterator[common.Chunk]) -> AsyncIterator[pb.ReturnResponse]:
        await self.connect()
        assert self.stub
        async for answer in self.stub.Return(chunks, metadata=rpc.metadata()):
            yield answer


Answer = pb.SubmitResponse | pb.ReturnResponse


class Outbox:
    """Sends groups over one stream and waits for their answers. What is unanswered when it breaks is sent again."""

    def __init__(self, open_stream: Callable[[AsyncIterator[common.Chunk]], AsyncIterator[Answer]]) -> None:
        self._open = open_stream
        self._keys = itertools.count(1)
        self._unanswered: dict[int, tuple[bytes, asyncio.Future[Answer]]] = {}
        self._queue: asyncio.Queue[int] = asyncio.Queue()

    async def send(self, group: SampleGroup) -> Answer:
        """The buffer's answer for this group: it is on disk there."""
        key = next(self._keys)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._unanswered[key] = (codec.group_to_message(group).SerializeToString(), future)
        self._queue.put_nowait(key)
        return await future

    async def run(self) -> None:
        """Keep the stream open; runs until it is cancelled."""
        while True:
            self._queue = asyncio.Queue()
            for key in self._unanswered:
                self._queue.put_nowait(key)
            try:
                async for answer in self._open(self._chunks(self._queue)):
                    _, future = self._unanswered.pop(answer.key, (b"", None))
                    if future and not future.done():
                        future.set_result(answer)
            except grpc.aio.AioRpcError as error:
                logs.get().warning("stream to the buffer broke", code=error.code().name, details=error.details())
            except rpc.DeadlineError as error:
                logs.get().warning("the buffer is away", error=str(error))
            await asyncio.sleep(_REOPEN_SECONDS)

    async def _chunks(self, queue: asyncio.Queue[int]) -> AsyncIterator[common.Chunk]:
        while True:
            key = await queue.get()
            if key in self._unanswered:
                for chunk in codec.to_chunks(key, self._unanswered[key][0]):
                    yield chunk
