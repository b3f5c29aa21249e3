"""A stream to the buffer that breaks: groups without an answer are sent again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from sluice.samples.sample import Prompt, SampleGroup
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_rollout.buffer import Answer, Outbox


class Streams:
    """The first stream breaks after one group, as gRPC's do: its reader stays. The second one
    answers."""

    def __init__(self) -> None:
        self.readers: list[asyncio.Task[None]] = []
        self.keys: list[int] = []

    async def open(self, chunks: AsyncIterator[common.Chunk]) -> AsyncIterator[Answer]:
        arrived: asyncio.Queue[int] = asyncio.Queue()

        async def read() -> None:
            async for chunk in chunks:
                arrived.put_nowait(chunk.key)

        self.readers.append(asyncio.create_task(read()))
        self.keys.append(await arrived.get())
        if len(self.readers) == 1:
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "broken")
        yield pb.SubmitResponse(key=self.keys[-1])


async def test_a_broken_stream_leaves_no_reader() -> None:
    streams = Streams()
    outbox = Outbox(streams.open)
    running = asyncio.create_task(outbox.run())
    group = SampleGroup(prompt=Prompt(group_id=7, prompt="one"), samples=[])
    async with asyncio.timeout(30):
        await outbox.send(group)
        await streams.readers[0]
    running.cancel()
    await asyncio.wait({running})
    assert streams.keys[0] == streams.keys[1]
