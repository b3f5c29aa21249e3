"""Memory for messages under way, given to calls in the order of their coming."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Budget:
    """Bytes under way, at most `limit`. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes are free, and take them.

        A size above the limit counts as the limit.
        """
        size = min(size, self.limit)
        if self._waiting or self.used + size > self.limit:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, waiter))
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self.free(size)  # the bytes came while this task was being cancelled
                self._next()
                raise
        else:
            self._take(size)

    def free(self, size: int) -> None:
        """Return bytes that `reserve` took."""
        self.used -= min(size, self.limit)
        self._next()

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes while the context lasts."""
        await self.reserve(size)
        try:
            yield
        finally:
            self.free(size)

    def _take(self, size: int) -> None:
        self.used += size
        self.peak = max(self.peak, self.used)

    def _next(self) -> None:
        while self._waiting:
            size, waiter = self._waiting[0]
            if not waiter.done():
                if self.used + size > self.limit:
                    return
                self._take(size)
                waiter.set_result(None)
            self._waiting.popleft()
