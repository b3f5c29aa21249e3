"""The time limit of user code, suspended while a request of it is at the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class TimeLimit:
    """The time limit of one call of a function."""

    # Time between two turns of the model; 0: no limit.
    seconds: float
    # Set while no request of the function is at the engine.
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _timeout: asyncio.Timeout | None = None
    _requests: int = 0
    _stops: int = 0

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def expired(self) -> bool:
        return self._timeout is not None and self._timeout.expired()

    def start(self, timeout: asyncio.Timeout) -> None:
        """Limit what runs inside of `timeout` from now on."""
        self._timeout = timeout
        self._run()

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

    def _run(self) -> None:
        if self.seconds:
            self._set(asyncio.get_running_loop().time() + self.seconds)

    def _set(self, when: float | None) -> None:
        if self._timeout and not self._timeout.expired():
            self._timeout.reschedule(when)
