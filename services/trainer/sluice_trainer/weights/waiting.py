"""Waiting for what may never come: an engine's answer, a thread that is stuck in a join."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any


def succeeded(task: asyncio.Task[None]) -> bool:
    """True where it has come to its end, and to no failure."""
    return task.done() and not task.cancelled() and task.exception() is None


async def wait_until_sent(sent: asyncio.Task[None], answers: Sequence[asyncio.Task[None]]) -> None:
    """Wait until a bucket has gone. An engine that refuses will never take part in that."""
    waiting: set[asyncio.Task[None]] = {sent, *answers}
    while sent in waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def wait_for_both(engine: asyncio.Task[None], ours: asyncio.Task[Any]) -> None:
    """Wait for both ends; the first failure ends the wait, so that nobody waits for a peer that
    said no.
    """
    try:
        done, _ = await asyncio.wait([engine, ours], return_when=asyncio.FIRST_EXCEPTION)
        for task in sorted(
            done, key=lambda task: task is ours
        ):  # what the engine says is the better reason
            task.result()
    finally:
        for task in (engine, ours):
            task.cancel()
        await asyncio.gather(engine, ours, return_exceptions=True)


async def run_in_daemon_thread(blocking: Callable[[], Any], dispose: Callable[[Any], None]) -> Any:
    """Run in a thread that nobody waits for: one that is stuck in a join must not keep the process
    from its end.

    dispose: what to do with a result that comes when nobody wants it any more.
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
        except Exception as raised:  # handed over to whoever waits
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop has ended first, and with it the process
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="join", daemon=True).start()
    return await future
