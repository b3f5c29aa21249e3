"""Workers that wait for prompts, in the order in which they came.

Only as many are called up as there is something for: a thousand workers that wait cost a commit
nothing.
"""

from __future__ import annotations

import asyncio
import itertools

from sluice_buffer.core import Buffer


class Line:
    """Waiting calls, by the weight version that their workers serve. Belongs to one event loop."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._waiting: dict[int, dict[asyncio.Future[None], None]] = {}

    async def wait(self, version: int, seconds: float) -> None:
        """Wait until there may be something for a worker that serves `version`, for at most
        `seconds`.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(version, {})
        line[turn] = None
        try:
            async with asyncio.timeout(seconds):
                await turn
        except TimeoutError:
            return
        finally:
            line.pop(turn, None)
            if not line and self._waiting.get(version) is line:
                del self._waiting[version]

    def call_up(self) -> None:
        """Let those go on for whom there is something now: prompts, newer weights, or the end."""
        for version, line in list(self._waiting.items()):
            count = (
                len(line) if self.news(version) else min(len(line), self._buffer.available(version))
            )
            for turn in list(itertools.islice(line, count)):
                line.pop(turn)
                if not turn.done():
                    turn.set_result(None)

    def news(self, version: int) -> bool:
        """True where a worker that serves `version` should be answered although there is no prompt
        for it.
        """
        return self._buffer.over or self._buffer.memory.progress.step > version
