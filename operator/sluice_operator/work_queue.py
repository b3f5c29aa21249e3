"""A work queue of keys, as in client-go.

A key that is added several times before a worker takes it is processed once. A key that is added
while it is processed is processed once more afterwards. Two workers never process the same key.
After a failure a key returns with a delay, which doubles with each failure in a row.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from sluice_operator.metrics import QueueMetrics

K = TypeVar("K", bound=Hashable)
BASE_SECONDS = 0.1
MAX_SECONDS = 300.0


class WorkQueue(Generic[K]):
    """A work queue for the workers of one event loop."""

    def __init__(self, metrics: QueueMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._ready: deque[K] = deque()
        # Keys that wait, and keys that are being processed, each with its time of entry.
        self._dirty: dict[K, float] = {}
        self._working: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = itertools.count()
        self._wake = asyncio.Event()
        metrics.unfinished.set_function(lambda: sum(self._ages()))
        metrics.longest.set_function(lambda: max(self._ages(), default=0.0))

    def _ages(self) -> list[float]:
        # Called by the thread that serves metrics, so the dict may change meanwhile.
        now = self._clock()
        return [now - since for since in list(self._working.values())]

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: K) -> None:
        self._due.pop(key, None)
        if key in self._dirty:
            return
        self._dirty[key] = self._clock()
        self._metrics.adds.inc()
        if key not in self._working:
            self._push(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Add the key after a delay.

        Of several delays for a key the shortest counts. An `add` in the meantime cancels them.
        """
        if seconds <= 0:
            self.add(key)
            return
        due = self._clock() + seconds
        if (key in self._dirty and key not in self._working) or self._due.get(key, due + 1) <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._count), key))
        self._wake.set()

    def retry(self, key: K, at_least: float = 0.0, at_most: float = MAX_SECONDS) -> float:
        """Add the key after a back-off, and return its seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self._metrics.retries.inc()
        delay = max(at_least, min(BASE_SECONDS * 2.0 ** min(failures, 32), at_most))
        self.add_after(key, delay)
        return delay

    def succeeded(self, key: K) -> None:
        """Reset the back-off of the key."""
        self._failures.pop(key, None)

    def forget(self, key: K) -> None:
        """Drop the back-off and the delay of a key whose object is gone."""
        self._failures.pop(key, None)
        self._due.pop(key, None)

    async def get(self) -> K:
        """Wait for a key and take it. The caller has to call `done` afterwards."""
        while True:
            self._promote()
            if self._ready:
                break
            self._wake.clear()
            await self._sleep()
        key = self._ready.popleft()
        now = self._clock()
        self._metrics.depth.set(len(self._ready))
        self._metrics.queue_seconds.observe(now - self._dirty.pop(key))
        self._working[key] = now
        return key

    def done(self, key: K) -> None:
        self._metrics.work_seconds.observe(self._clock() - self._working.pop(key))
        if key in self._dirty:
            self._push(key)

    def _push(self, key: K) -> None:
        self._ready.append(key)
        self._metrics.depth.set(len(self._ready))
        self._wake.set()

    def _promote(self) -> None:
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                self.add(key)

    async def _sleep(self) -> None:
        """Wait until a key is added or the next delayed key is due."""
        timeout = max(self._heap[0][0] - self._clock(), 0.0) if self._heap else None
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            return
