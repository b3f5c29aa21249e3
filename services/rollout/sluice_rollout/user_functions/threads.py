"""Threads for user functions that are not async. A function that hangs blocks only its thread.

Python cannot end a thread. So a call that takes too long is abandoned, and its place goes to the
next call. Once too many calls hang, no further call is begun, with an error that says so. (The
event loop's pool would fill up with hanging calls, and the process would wait for each of them at
its end.)
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from sluice_rollout import metrics

SIZE = 64
MOST_HANGING = 64


class LateError(TimeoutError):
    """A call took too long."""


class NoThreadError(Exception):
    """A call was not begun, which is not its fault. The message says what holds the threads."""


class UserExitError(Exception):
    """User code called `sys.exit`, which ends only its call."""


@dataclass(slots=True)
class Threads:
    """A pool for a number of calls at a time, in addition to abandoned ones."""

    # Label in metrics.
    name: str
    size: int = SIZE
    most_hanging: int = MOST_HANGING
    # Abandoned calls that have not ended, by their function.
    hanging: Counter[str] = field(default_factory=Counter)
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.size)

    async def call(self, function: Callable[..., Any], *args: Any, seconds: float) -> Any:
        """Call the function: in a thread, or in the event loop if it is async.

        Parameters
        ----------
        function
            The user's function.
        *args
            Its arguments.
        seconds
            Time limit, without the wait for a thread.

        Raises
        ------
        LateError
            If the call takes too long.
        NoThreadError
            If too many calls hang.

        """
        if inspect.iscoroutinefunction(function):
            return await _in_time(function(*args), seconds)
        value = await self._in_thread(_name(function), functools.partial(function, *args), seconds)
        if inspect.isawaitable(value):  # a coroutine function in a plain wrapper
            return await _in_time(value, seconds)
        return value

    async def _in_thread(self, name: str, call: Callable[[], Any], seconds: float) -> Any:
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = (
            asyncio.get_running_loop().create_future()
        )
        self._check()
        async with self._places:
            self._check()
            _start(name, call, outcome)
            try:
                value, error = await _in_time(asyncio.shield(outcome), seconds)
            finally:
                if not outcome.done():
                    self._leave(name, outcome)
        if error is not None:
            raise error
        return value

    def _check(self) -> None:
        if (count := self.hanging.total()) >= self.most_hanging:
            names = ", ".join(f"{name} ({n})" for name, n in self.hanging.most_common(5))
            raise NoThreadError(
                f"{count} calls hang, and no more are begun until one of them ends: {names}"
            )

    def _leave(self, name: str, outcome: asyncio.Future[Any]) -> None:
        """Abandon a call, which goes on in its thread."""
        self.hanging[name] += 1
        gauge = metrics.HANGING_CALLS.labels(pool=self.name)
        gauge.inc()

        def ended(_: asyncio.Future[Any]) -> None:
            self.hanging[name] -= 1
            self.hanging += Counter()  # removes zeros
            gauge.dec()

        outcome.add_done_callback(ended)


def _start(
    name: str, call: Callable[[], Any], outcome: asyncio.Future[tuple[Any, BaseException | None]]
) -> None:
    """Call the function in a new thread. Raises NoThreadError."""
    loop = outcome.get_loop()

    def run() -> None:
        try:
            result: tuple[Any, BaseException | None] = call(), None
        except (SystemExit, KeyboardInterrupt) as error:
            result = None, _exit(error)
        except BaseException as error:
            result = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(outcome.set_result, result)

    context = contextvars.copy_context()
    try:
        threading.Thread(
            target=context.run, args=(run,), name=f"user's {name}", daemon=True
        ).start()
    except RuntimeError as error:
        raise NoThreadError(f"the system cannot start a thread: {error}") from error


async def _in_time(value: Awaitable[Any], seconds: float) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await contained(value)
    except TimeoutError as error:
        if limit.expired():
            raise LateError(f"no end after {seconds:g} s") from error
        raise


async def contained(value: Awaitable[Any]) -> Any:
    """Await user code. SystemExit, which would end the event loop, becomes UserExitError."""
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:
        raise _exit(error) from error


def _exit(error: BaseException) -> UserExitError:
    return UserExitError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def _name(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))
