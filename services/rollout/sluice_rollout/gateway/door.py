"""Connections to the gateway: those that show no key are few, and soon closed.

A key is checked with every request, but a connection that never finishes a request has shown none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp.web import RequestHandler

SECONDS = 10.0
STRANGERS = 256  # connections without a key, beside those that programs are about to use
STRANGERS_OF_KEY = 4


@dataclass(slots=True)
class Door:
    """Makes the connections of a server, and closes those that show no key.

    make: the server's own factory. keys: how many keys are open; programs that start all at once
    connect before any of them shows its key. seconds: until a stranger is closed.
    """

    make: Callable[[], RequestHandler]
    keys: Callable[[], int]
    seconds: float
    _strangers: dict[RequestHandler, asyncio.TimerHandle] = field(default_factory=dict)

    def __call__(self) -> RequestHandler:
        """A new connection, a stranger until `admit`. The oldest stranger makes room for it."""
        if len(self._strangers) >= STRANGERS + STRANGERS_OF_KEY * self.keys():
            self._close(next(iter(self._strangers)))
        connection = self.make()
        loop = asyncio.get_running_loop()
        self._strangers[connection] = loop.call_later(self.seconds, self._close, connection)
        return connection

    def admit(self, connection: object) -> None:
        """Keep a connection that has shown a key."""
        if isinstance(connection, RequestHandler) and connection in self._strangers:
            self._strangers.pop(connection).cancel()

    def _close(self, connection: RequestHandler) -> None:
        self._strangers.pop(connection).cancel()
        if connection.transport is not None:
            connection.force_close()
