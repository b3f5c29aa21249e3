"""Workers that wait for prompts, in the order in which they came.

Only as many are called up as there is something for:
a thousand workers that wait cost a commit nothing.
"""

from __future__ import annotations

import asyncio
import itertools

from sluice_buffer.core import Buffer


class WaitingCalls:
    """Waiting calls, by the weight version that their workers serve. Belongs to one event loop."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._waiting: dict[int, dict[asyncio.Future[None], None]] = {}

    async def wait(self, version: int, seconds: float) -> None:
        """Wait until there may be something for a worker that serves `version`,
        for at most `seconds`.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(version, {})
        queue[waiter] = None
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            return
        finally:
            queue.pop(waiter, None)
            if not queue and self._waiting.get(version) is queue:
                del self._waiting[version]

    def call_up(self) -> None:
        """Let those go on for whom there is something now: prompts, newer weights, or the end."""
        for version, queue in list(self._waiting.items()):
            count = len(queue)
            if not self.news(version):
                count = min(count, self._buffer.available(version))
            for waiter in list(itertools.islice(queue, count)):
                queue.pop(waiter)
                if not waiter.done():
                    waiter.set_result(None)

    def news(self, version: int) -> bool:
        """True where a worker that serves `version` should be answered although there is no prompt
        for it.
        """
        return self._buffer.over or self._buffer.memory.progress.step > version
