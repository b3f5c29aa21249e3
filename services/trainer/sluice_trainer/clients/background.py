"""An event loop in the background of the blocking training code.

Heartbeats must continue while the training computes.
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
    """The trainer was told to stop.

    Trained steps are saved, or will be trained again on the same samples.
    """


class Background:
    """An event loop in a thread, which runs all communication.

    The training loop calls it and waits.

    Parameters
    ----------
    stop
        Set by SIGTERM. From then on no call waits for an absent service longer than STOP_SECONDS.

    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="background", daemon=True
        )
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], *, stoppable: bool = False) -> T:
        """Run a coroutine and return its result.

        Parameters
        ----------
        coroutine
            Coroutine to run on the loop.
        stoppable
            Give up STOP_SECONDS after SIGTERM.

        Raises
        ------
        Stopped
            A stoppable call was given up.

        """
        return self.start(self.until_stopped(coroutine) if stoppable else coroutine).result()

    async def until_stopped(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the loop, but not longer than STOP_SECONDS after SIGTERM.

        Raises
        ------
        Stopped
            The coroutine was given up.

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
        """Start a coroutine without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, callback: Callable[[], object]) -> None:
        """Schedule a callback on the loop."""
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        self.soon(self._loop.stop)
        self._thread.join(timeout=10)
