"""Helpers to wait for events that may never come: an engine's answer, a thread stuck in a join."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any


def succeeded(task: asyncio.Task[None]) -> bool:
    """Return True if the task has ended without an error or cancellation."""
    return task.done() and not task.cancelled() and task.exception() is None


async def wait_until_sent(sent: asyncio.Task[None], answers: Sequence[asyncio.Task[None]]) -> None:
    """Wait until a bucket has been sent, or an engine's answer fails.

    An engine that refuses never takes part in the broadcast, so its failure ends the wait.
    """
    waiting: set[asyncio.Task[None]] = {sent, *answers}
    while sent in waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def wait_for_both(engine: asyncio.Task[None], trainer: asyncio.Task[Any]) -> None:
    """Wait for both ends of a connection; the first failure ends the wait.

    So the trainer does not wait for an engine that has already refused.
    """
    try:
        done, _ = await asyncio.wait([engine, trainer], return_when=asyncio.FIRST_EXCEPTION)
        # The engine's error comes first: it explains more.
        for task in sorted(done, key=lambda task: task is trainer):
            task.result()
    finally:
        for task in (engine, trainer):
            task.cancel()
        await asyncio.gather(engine, trainer, return_exceptions=True)


async def run_in_daemon_thread(blocking: Callable[[], Any], dispose: Callable[[Any], None]) -> Any:
    """Run a blocking function in a daemon thread and wait for its result.

    A daemon thread that is stuck in a join does not keep the process from ending.

    Parameters
    ----------
    blocking
        The function.
    dispose
        Called with a result that arrives after the wait was given up.

    Returns
    -------
    The result of `blocking`.

    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            if error is None:
                dispose(result)
        elif error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        try:
            result, error = blocking(), None
        except Exception as raised:  # raised again in `settle`
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="join", daemon=True).start()
    return await future
