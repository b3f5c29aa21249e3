"""A stream of groups that come in: put together, handed to the buffer, answered one by one once they are durable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc.aio

from sluice.sample import SampleError
from sluice.wire.codec import Assembler
from sluice.wire.v1 import common_pb2
from sluice_buffer.committer import Committer
from sluice_buffer.errors import CallError
from sluice_buffer.storage import StorageError

R = TypeVar("R")
MAX_GROUP_BYTES = 256 << 20
WINDOW_BYTES = 32 << 20
"""So much of one stream may wait for the disk; then the stream is read no further, and HTTP/2 holds the sender back."""
_DRAIN_SECONDS = 0.2
"""A stream that ends by an error is read on for so long: a client that is still sending would otherwise see its own
broken send (INTERNAL) instead of our error."""


class Intake(Generic[R]):
    """One stream. `transition(data)` is what to run for a group, `answer(key, result)` the message that answers it."""

    def __init__(
        self,
        committer: Committer,
        context: grpc.aio.ServicerContext,
        transition: Callable[[bytes], Callable[[], R]],
        answer: Callable[[int, R], Any],
        refuse: Callable[[str], R],
    ) -> None:
        self._committer, self._context = committer, context
        self._transition, self._answer, self._refuse = transition, answer, refuse
        self._assembler = Assembler(MAX_GROUP_BYTES)
        self._skipped: set[int] = set()
        self._answers: list[Any] = []
        self._open = 0
        self._bytes = 0
        self._ended = False
        self._failure: CallError | StorageError | None = None
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def serve(self) -> CallError | StorageError | None:
        """Answer until the stream has ended. Returns the error that ends it early, after all answers due before it."""
        reader = asyncio.create_task(self._read())
        try:
            while not (self._ended and not self._open and not self._answers):
                await self._news.wait()
                self._news.clear()
                answers, self._answers = self._answers, []
                for answer in answers:
                    await self._context.write(answer)
                if self._failure and not self._open and not self._answers:
                    await asyncio.wait({reader}, timeout=_DRAIN_SECONDS)
                    return self._failure
            await reader
            return self._failure
        finally:
            reader.cancel()

    async def _read(self) -> None:
        try:
            while True:
                chunk = await self._context.read()
                if chunk is grpc.aio.EOF:
                    return
                data = self._assemble(chunk) if self._failure is None else None
                if data is not None:
                    self._take(chunk.key, data)
                    await self._room.wait()
        finally:
            self._ended = True
            self._news.set()

    def _assemble(self, chunk: common_pb2.Chunk) -> bytes | None:
        if chunk.key in self._skipped:
            if chunk.last:
                self._skipped.discard(chunk.key)
            return None
        try:
            return self._assembler.add(chunk)
        except SampleError as error:
            self._assembler.drop(chunk.key)
            if not chunk.last:
                self._skipped.add(chunk.key)
            self._reply(self._answer(chunk.key, self._refuse(str(error))))
            return None

    def _take(self, key: int, data: bytes) -> None:
        size = len(data)
        self._open += 1
        self._bytes += size
        if self._bytes > WINDOW_BYTES:
            self._room.clear()

        def done(result: R | None, error: Exception | None) -> None:
            self._open -= 1
            self._bytes -= size
            if self._bytes <= WINDOW_BYTES:
                self._room.set()
            if result is not None:
                self._reply(self._answer(key, result))
            elif isinstance(error, CallError | StorageError):
                self._failure = self._failure or error
                self._news.set()

        self._committer.apply(self._transition(data), done)

    def _reply(self, message: Any) -> None:
        self._answers.append(message)
        self._news.set()
