"""An event loop beside the training, which is plain, blocking code: heartbeats must go on while it
computes.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
STOP_SECONDS = 5.0
_TICK_SECONDS = 0.5


class Stopped(Exception):  # noqa: N818 - not an error
    """The trainer was asked to stop. What is trained is saved, or will be trained again from the
    same samples.
    """


class Background:
    """An event loop in a thread of its own. Everything that talks runs on it; the training loop
    calls it and waits.
    """

    def __init__(self, stop: threading.Event) -> None:
        """stop: set by SIGTERM. From then on no absent peer is waited for longer than
        STOP_SECONDS.
        """
        self._stop = stop
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="background", daemon=True
        )
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], *, stoppable: bool = False) -> T:
        """The result of a coroutine. stoppable: raises Stopped where it still waits long after
        SIGTERM.
        """
        return self.start(self.until_stopped(coroutine) if stoppable else coroutine).result()

    async def until_stopped(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that waits for a peer, on the loop. Raises Stopped where it
        still waits STOP_SECONDS after SIGTERM.
        """
        waiting, give_up = asyncio.ensure_future(coroutine), math.inf
        try:
            while not (await asyncio.wait([waiting], timeout=_TICK_SECONDS))[0]:
                if self._stop.is_set():
                    give_up = min(give_up, time.monotonic() + STOP_SECONDS)
                if time.monotonic() > give_up:
                    raise Stopped
            return waiting.result()
        finally:
            waiting.cancel()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine, and do not wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, callback: Callable[[], object]) -> None:
        """Have the loop call this."""
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        self.soon(self._loop.stop)
        self._thread.join(timeout=10)
