"""The time limits of user code: between two turns of the model, and of the whole episode.

The time between two turns (`rollout.functionSeconds`) is suspended while a request is at the
engine. The time of the episode (`rollout.limits.seconds`) counts from its first turn, whatever
happens in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Seconds in which user code may end after the time of its episode: write a result, for example.
GRACE_SECONDS = 30.0


@dataclass(slots=True)
class TimeLimit:
    """The time limits of one call of a function, or one run of a program."""

    # Time between two turns of the model; 0: no limit.
    seconds: float
    # Time of the episode, from its first turn; None: no limit.
    episode_seconds: float | None = None
    # False: an episode whose time has passed fails, at once.
    truncates: bool = True
    # Set while no request of the function is at the engine.
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    # Set once the episode's time has passed, if that truncates it: no more tokens are generated.
    over: asyncio.Event = field(default_factory=asyncio.Event)
    # Set once what still runs has to be ended.
    _late: asyncio.Event = field(default_factory=asyncio.Event)
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)
    _timeout: asyncio.Timeout | None = None
    _requests: int = 0
    _stops: int = 0

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def expired(self) -> bool:
        """True if the time between two turns was exceeded."""
        return self._timeout is not None and self._timeout.expired()

    def start(self, timeout: asyncio.Timeout) -> None:
        """Limit what runs inside of `timeout` from now on."""
        self._timeout = timeout
        self._run()

    def start_episode(self) -> None:
        """Count the episode's time from now on, unless it is counted already."""
        if self.episode_seconds is None or self._timers:
            return
        loop, seconds = asyncio.get_running_loop(), self.episode_seconds
        if self.truncates:
            self._timers.append(loop.call_later(seconds, self._end_episode))
            seconds += GRACE_SECONDS
        self._timers.append(loop.call_later(seconds, self._late.set))

    def close(self) -> None:
        """End the counting of the episode's time."""
        for timer in self._timers:
            timer.cancel()

    async def ends_in_time(self, work: asyncio.Future[Any]) -> bool:
        """Wait for work. Returns False if the episode's time has passed and the work was ended."""
        late = asyncio.create_task(self._late.wait())
        try:
            await asyncio.wait({work, late}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            work.cancel()
            await work  # raises from the place at which the work was
            raise
        finally:
            late.cancel()
        if work.done():
            return True
        work.cancel()
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # retrieved, so that asyncio does not warn about it
        return False

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspend the limit, for work outside of the engine. A drain does not wait for its end."""
        self._stops += 1
        self._set(None)
        try:
            yield
        finally:
            self._stops -= 1
            if not self._stops:
                self._run()

    @contextmanager
    def at_engine(self) -> Iterator[None]:
        """Suspend the limit while a request is at the engine. Several may be at a time."""
        self._requests += 1
        self.idle.clear()
        try:
            with self.stopped():
                yield
        finally:
            self._requests -= 1
            if not self._requests:
                self.idle.set()

    def _end_episode(self) -> None:
        self.over.set()
        self._set(None)  # from here on GRACE_SECONDS is the limit

    def _run(self) -> None:
        if self.seconds and not self.over.is_set():
            self._set(asyncio.get_running_loop().time() + self.seconds)

    def _set(self, when: float | None) -> None:
        if self._timeout and not self._timeout.expired():
            self._timeout.reschedule(when)
