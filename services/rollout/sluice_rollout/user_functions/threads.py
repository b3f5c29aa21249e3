"""Threads for a user's functions that are not async. One that hangs keeps its own thread only.

Python cannot end a thread. So a call that takes longer than it may is left alone, and its place
goes to the next one; once too many hang, no further call is begun, with an error that says so. (The
event loop's own pool would fill up with them, and the process would wait for each at its end.)
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
    """A call took longer than it may."""


class NoThreadError(Exception):
    """A call was not begun, for no fault of its own. The message says what holds the threads."""


class UserExitError(Exception):
    """A user's function asked the process to end (`sys.exit`), which only ends its call."""


@dataclass(slots=True)
class Threads:
    """A pool for `size` calls at a time, beside `most_hanging` that nobody waits for any more.

    name: for metrics.
    """

    name: str
    size: int = SIZE
    most_hanging: int = MOST_HANGING
    hanging: Counter[str] = field(default_factory=Counter)
    """Calls that nobody waits for any more, by their function."""
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.size)

    async def call(self, function: Callable[..., Any], *args: Any, seconds: float) -> Any:
        """Call the function: in a thread, or here if it is async.

        seconds: that it may take, not counting the wait for a thread. Raises LateError,
        NoThreadError, and what the function raises.
        """
        if inspect.iscoroutinefunction(function):
            return await _in_time(function(*args), seconds)
        value = await self._in_thread(_name(function), functools.partial(function, *args), seconds)
        if inspect.isawaitable(value):  # a coroutine function in a wrapper that is none
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
        """The call goes on, and nobody waits for it."""
        self.hanging[name] += 1
        gauge = metrics.HANGING_CALLS.labels(pool=self.name)
        gauge.inc()

        def ended(_: asyncio.Future[Any]) -> None:
            self.hanging[name] -= 1
            self.hanging += Counter()  # forgets those of which there are none
            gauge.dec()

        outcome.add_done_callback(ended)


def _start(
    name: str, call: Callable[[], Any], outcome: asyncio.Future[tuple[Any, BaseException | None]]
) -> None:
    """Call it in a thread of its own. Raises NoThreadError."""
    loop = outcome.get_loop()

    def run() -> None:
        try:
            told: tuple[Any, BaseException | None] = call(), None
        except (SystemExit, KeyboardInterrupt) as error:
            told = None, _exit(error)
        except BaseException as error:
            told = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(outcome.set_result, told)

    context = contextvars.copy_context()
    try:
        threading.Thread(
            target=context.run, args=(run,), name=f"user's {name}", daemon=True
        ).start()
    except RuntimeError as error:
        raise NoThreadError(f"the system gives no thread: {error}") from error


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
    """Await a user's code. Where it raises SystemExit, which would end the loop: UserExitError."""
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:
        raise _exit(error) from error


def _exit(error: BaseException) -> UserExitError:
    return UserExitError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def _name(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))
