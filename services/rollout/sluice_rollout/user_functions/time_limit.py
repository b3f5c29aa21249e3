"""The time that a user's function takes:
it stands still while any of its requests is at the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class TimeLimit:
    """One call of a function.

    seconds: what it may take between two turns of the model; 0: for ever.

    free: set while none of its requests is at the engine.
    """

    seconds: float
    free: asyncio.Event = field(default_factory=asyncio.Event)
    _limit: asyncio.Timeout | None = None
    _requests: int = 0
    _stops: int = 0

    def __post_init__(self) -> None:
        self.free.set()

    @property
    def expired(self) -> bool:
        return self._limit is not None and self._limit.expired()

    def start(self, limit: asyncio.Timeout) -> None:
        """Limit what runs inside of `limit` from now on."""
        self._limit = limit
        self._run()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The time stands still, for something else than the engine: a drain does not wait for
        its end.
        """
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
        """Several requests may be on their way at the same time."""
        self._requests += 1
        self.free.clear()
        try:
            with self.stopped():
                yield
        finally:
            self._requests -= 1
            if not self._requests:
                self.free.set()

    def _run(self) -> None:
        if self.seconds:
            self._set(asyncio.get_running_loop().time() + self.seconds)

    def _set(self, when: float | None) -> None:
        if self._limit and not self._limit.expired():
            self._limit.reschedule(when)
