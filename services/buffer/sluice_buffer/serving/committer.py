"""Group commit: transitions run at once on the event loop, their answers wait for the disk.

While a write is under way, new transitions gather for the next one, so as many calls share the cost
of a sync as arrive during one. The write runs on a separate thread, and holds no Python lock while
it waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from sluice_buffer.core import Buffer
from sluice_buffer.errors import CallError
from sluice_buffer.state.memory import Memory
from sluice_buffer.state.storage import StorageError, StorageFullError, WriteBatch

T = TypeVar("T")
_Done = Callable[[Any, Exception | None], None]
_Entry = tuple[Callable[[], Any], Any, _Done]
_log = structlog.get_logger("buffer")
# Writes start at least this far apart, so that more calls share the cost of one under load. A call
# that comes alone does not wait.
PACE_SECONDS = 0.004
# A write of so many bytes is worth a sync at once.
BULK_BYTES = 4 << 20
# At most this many bytes, and one group more, wait for a write: LMDB holds a copy of all that it
# writes at once.
STAGED_BYTES = 16 << 20
# If values have this mean size, they are copied while the event loop runs on, not before.
_LARGE_VALUE = 64 << 10
# Longest time that the event loop waits for a write to be staged; see Storage.write.
_STAGE_SECONDS = 0.1


class Committer:
    """Runs transitions of a buffer, and reports when they are durable.

    Belongs to one event loop.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        # Gets an exception once the storage cannot be used any more. The process should end then.
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._waiting: list[_Entry] = []
        # Transitions that came while the memory is loaded again.
        self._postponed: list[tuple[Callable[[], Any], _Done]] = []
        self._recovery: asyncio.Task[None] | None = None
        self._flying = False
        self._started = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._watchers: set[asyncio.Future[None]] = set()
        # Number of writes that have finished.
        self.changes = 0
        # Called after each finished write.
        self.landed_hooks: list[Callable[[], None]] = []

    def apply(
        self, transition: Callable[[], T], done: Callable[[T | None, Exception | None], None]
    ) -> None:
        """Run a transition now, and call `done` once its result is durable or it was refused.

        `done` gets the result, or the error. If the write fails, the transition may run a second
        time, on a memory that was loaded again.
        """
        if self._recovery:
            self._postponed.append((transition, done))
            return
        try:
            result = transition()
        except (CallError, StorageFullError) as error:
            done(None, error)
            return
        except (
            Exception
        ) as error:  # a bug: the memory may be half changed, and must not reach the disk
            self._break(error, [(transition, None, done)])
            raise
        self._waiting.append((transition, result, done))
        self._kick()

    async def run(self, transition: Callable[[], T]) -> T:
        """Run a transition and wait until it is durable. Raises CallError or StorageError."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: T | None, error: Exception | None) -> None:
            if future.done():
                return  # the caller has left
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        self.apply(transition, done)
        return await future

    async def wait_for_space(self) -> None:
        """Wait until no more is staged for the next write than can be copied at once."""
        while self.buffer.memory.batch.size >= STAGED_BYTES and not self.broken.done():
            await self.changed(self.changes, 1.0)

    def _kick(self) -> None:
        """Start the next write, unless one is under way or the last one has just started."""
        bulky = self.buffer.memory.batch.size >= BULK_BYTES
        if self._flying or (self._timer and not bulky) or not self._waiting or self.broken.done():
            return
        loop = asyncio.get_running_loop()
        early = self._started + PACE_SECONDS - loop.time()
        if early > 0 and not bulky:
            self._timer = loop.call_later(early, self._write)
        else:
            self._write()

    def _write(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self.broken.done():
            return
        batch = self.buffer.flush()
        entries, self._waiting = self._waiting, []
        if not batch:
            self._answer(entries)
            return
        self._flying, staged, self._started = (
            True,
            threading.Event(),
            asyncio.get_running_loop().time(),
        )
        future = asyncio.get_running_loop().run_in_executor(
            self._pool, self.buffer.storage.write, batch, staged
        )
        if batch.size < len(batch) * _LARGE_VALUE:
            staged.wait(_STAGE_SECONDS)
        future.add_done_callback(lambda landed: self._landed(landed, entries))

    def _answer(self, entries: list[_Entry]) -> None:
        for _, result, done in entries:
            done(result, None)

    def _landed(self, landed: asyncio.Future[None], entries: list[_Entry]) -> None:
        error = landed.exception()
        if error is not None:
            self._recovery = asyncio.create_task(self._recover(entries, error))
            return
        self._answer(entries)
        self._go_on()

    def _go_on(self) -> None:
        self._flying = False
        self._wake()
        self._kick()

    async def _recover(self, entries: list[_Entry], error: BaseException) -> None:
        """Go back to the state on disk after a failed write, and try each transition alone.

        So only those transitions fail that must. All waiting for the disk is done off the event
        loop: workers get answers meanwhile.
        """
        _log.warning(
            "write failed", error=str(error), transitions=len(entries) + len(self._waiting)
        )
        self._postponed = [
            (transition, done) for transition, _, done in entries + self._waiting
        ] + self._postponed
        self._waiting = []
        try:
            await self._reload()
            if isinstance(error, StorageFullError):
                self.buffer.capacity.note_full(error)
            while self._postponed:
                transition, done = self._postponed[0]
                await self._alone(transition, done)
                del self._postponed[0]
        except (
            Exception
        ) as fatal:  # the storage is broken, or a bug: in both cases the process must end
            self._break(fatal, [(transition, None, done) for transition, done in self._postponed])
            if not isinstance(fatal, StorageError):
                raise
        finally:
            self._recovery = None
        self._go_on()

    async def _alone(self, transition: Callable[[], Any], done: _Done) -> None:
        try:
            result = transition()
            await self._off_loop(self.buffer.storage.write, self.buffer.flush())
        except CallError as refused:
            done(None, refused)
        except StorageFullError as full:
            await self._reload()
            self.buffer.capacity.note_full(full)
            done(None, full)
        else:
            done(result, None)

    async def _reload(self) -> None:
        def load() -> Memory:
            self.buffer.storage.reopen()
            return self.buffer.load()

        self.buffer.use(await self._off_loop(load))

    async def _off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def _break(self, error: Exception, entries: list[_Entry]) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)
        for _, _, done in entries:
            done(None, error)

    def _wake(self) -> None:
        self.changes += 1
        for hook in self.landed_hooks:
            hook()
        watchers, self._watchers = self._watchers, set()
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    async def changed(self, since: int, seconds: float) -> None:
        """Wait for a write that finishes after `changes` was `since`, for at most `seconds`."""
        if self.changes != since:
            return
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.add(watcher)
        try:
            async with asyncio.timeout(seconds):
                await watcher
        except TimeoutError:
            return
        finally:
            self._watchers.discard(watcher)

    async def close(self) -> None:
        """Write all that is left, and end the thread."""
        await self.run(lambda: None)
        self._pool.shutdown(wait=True)


def durable(buffer: Buffer, batch: WriteBatch | None = None) -> None:
    """Write the present changes at once, at start-up and in tests, before an event loop runs."""
    buffer.storage.write(batch or buffer.flush())
