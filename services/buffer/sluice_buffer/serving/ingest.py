"""A stream of groups from a worker: assembled, passed to the buffer, answered once durable.

No part of a group is read before there is room in memory for all of it (budget.py). Until then the
stream is not read, and HTTP/2 holds the sender back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc.aio
from prometheus_client import Histogram

from sluice.api.schema.capacity_rules import largest_group
from sluice.samples.sample import SampleError
from sluice.wire.codec import Assembler
from sluice.wire.frames import prompt_of_beginning
from sluice.wire.v1 import common_pb2
from sluice_buffer.errors import CallError, SilentSenderError
from sluice_buffer.serving.budget import Budget
from sluice_buffer.serving.committer import Committer
from sluice_buffer.serving.metrics import RECEIVED_BYTES
from sluice_buffer.state.storage import StorageError

R = TypeVar("R")
# A sender that has begun a group must send its next piece within this time: other senders wait for
# the memory that the group holds.
PIECE_SECONDS = 60.0
# After an error the stream is read on for so long: a client that is still sending would otherwise
# see its broken send (INTERNAL) in place of the error.
_DRAIN_SECONDS = 0.2


class GroupReceiver(Generic[R]):
    """Receiver of a stream of groups.

    Parameters
    ----------
    take
        Transition for the bytes of a group.
    answer
        Makes the message that answers a group from its key and the result.
    refuse
        Makes the result for a group that is not even read, from the reason.
    seconds
        Histogram of the time until a group is answered.

    """

    def __init__(
        self,
        committer: Committer,
        budget: Budget,
        context: grpc.aio.ServicerContext,
        take: Callable[[bytes | bytearray], R],
        answer: Callable[[int, R], Any],
        refuse: Callable[[str], R],
        seconds: Histogram,
    ) -> None:
        self._committer, self._budget, self._context = committer, budget, context
        self._take, self._answer, self._refuse = take, answer, refuse
        self._seconds = seconds
        self._largest = largest_group(budget.limit)
        self._assembler = Assembler(self._largest)
        # Reserved bytes of each group whose pieces are arriving.
        self._reserved: dict[int, int] = {}
        self._skipped: set[int] = set()
        self._answers: list[Any] = []
        self._open = 0
        self._ended = False
        self._failure: CallError | StorageError | None = None
        self._news = asyncio.Event()

    async def serve(self) -> CallError | StorageError | None:
        """Answer groups until the stream ends.

        Returns the error that ends it early, after all answers that are due before it.
        """
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
            await asyncio.wait({reader})
            for size in self._reserved.values():
                self._budget.free(size)

    async def _read(self) -> None:
        try:
            while True:
                chunk = await self._next_piece()
                if chunk is grpc.aio.EOF:
                    return
                if self._failure is not None or self._skip(chunk):
                    continue
                if chunk.key not in self._reserved:
                    await self._budget.reserve(chunk.size)
                    self._reserved[chunk.key] = chunk.size
                data = self._assemble(chunk)
                if data is not None:
                    await self._committer.wait_for_space()
                    self._hand_in(chunk.key, data)
        except SilentSenderError as error:
            self._failure = self._failure or error
        finally:
            self._ended = True
            self._news.set()

    async def _next_piece(self) -> Any:
        """Read the next piece, within PIECE_SECONDS if a group that has begun holds memory."""
        seconds = PIECE_SECONDS if self._reserved else None
        try:
            async with asyncio.timeout(seconds):
                return await self._context.read()
        except TimeoutError:
            raise SilentSenderError(
                f"no further piece of a group came for {PIECE_SECONDS:.0f} s"
            ) from None

    def _skip(self, chunk: common_pb2.Chunk) -> bool:
        """True for a piece of a group that is refused because it is too large."""
        if chunk.key in self._skipped:
            if chunk.last:
                self._skipped.discard(chunk.key)
            return True
        if chunk.key in self._reserved or chunk.size <= self._largest:
            return False
        if not chunk.last:
            self._skipped.add(chunk.key)
        why = (
            f"a group of {chunk.size} bytes; the memory of the buffer is enough for "
            f"{self._largest}. Make spec.buffer.memory larger, or the group smaller"
        )
        prompt = prompt_of_beginning(chunk.data)
        if prompt is None:
            self._reply(self._answer(chunk.key, self._refuse(why)))
        else:
            self._apply(chunk.key, 0, lambda: self._refused(prompt, why))
        return True

    def _refused(self, prompt: common_pb2.Prompt, why: str) -> R:
        self._committer.buffer.refuse(prompt, why)
        return self._refuse(why)

    def _assemble(self, chunk: common_pb2.Chunk) -> bytes | bytearray | None:
        try:
            return self._assembler.add(chunk)
        except SampleError as error:
            self._budget.free(self._reserved.pop(chunk.key))
            if not chunk.last:
                self._skipped.add(chunk.key)
            self._reply(self._answer(chunk.key, self._refuse(str(error))))
            return None

    def _hand_in(self, key: int, data: bytes | bytearray) -> None:
        RECEIVED_BYTES.inc(len(data))
        self._apply(key, self._reserved.pop(key), lambda: self._take(data))

    def _apply(self, key: int, reserved: int, transition: Callable[[], R]) -> None:
        self._open += 1
        began = time.monotonic()

        def done(result: R | None, error: Exception | None) -> None:
            self._seconds.observe(time.monotonic() - began)
            self._open -= 1
            self._budget.free(reserved)
            if result is not None:
                self._reply(self._answer(key, result))
            elif isinstance(error, CallError | StorageError):
                self._failure = self._failure or error
                self._news.set()

        self._committer.apply(transition, done)

    def _reply(self, message: Any) -> None:
        self._answers.append(message)
        self._news.set()
