"""Access to the gateway: keys of episodes, and a limit on connections that have not shown one.

A key names group, sample and attempt for people who read logs, and ends in 256 random bits. Keys
are looked up and compared by their SHA-256, so the time of a comparison reveals nothing of a key.

The server checks a key with every request. A connection that never finishes a request shows no key,
so `ConnectionLimiter` bounds how many such connections there are, and for how long.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from aiohttp.web import RequestHandler

from sluice_rollout import metrics
from sluice_rollout.gateway.interfaces.errors import GatewayError, refused_key

T = TypeVar("T")
UNAUTHENTICATED_SECONDS = 10.0
MAX_UNAUTHENTICATED = 256
# Programs that start all at once connect before any of them shows its key.
MAX_UNAUTHENTICATED_PER_KEY = 4
_REMEMBERED_KEYS = 10_000
_BEARER, _BASIC = "Bearer ", "Basic "


def _key(authorization: str) -> str:
    """The key of a header: a bearer token, or the user name of basic authentication.

    Clients send basic authentication if the key is in the address: `http://KEY@HOST`.
    """
    if authorization.startswith(_BEARER):
        return authorization.removeprefix(_BEARER)
    try:
        name = base64.b64decode(authorization.removeprefix(_BASIC), validate=True)
        return name.decode().partition(":")[0] if authorization.startswith(_BASIC) else ""
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@dataclass(slots=True)
class EpisodeKeys(Generic[T]):
    """The keys of a worker's episodes, and the value that each opens."""

    _open: dict[bytes, T] = field(default_factory=dict)
    # Expired keys are remembered so that their refusal can say that they have expired.
    _expired: deque[bytes] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_KEYS))

    def __len__(self) -> int:
        """Count the keys that are open."""
        return len(self._open)

    def issue(self, group: int, sample: int, attempt: int, value: T) -> str:
        """Make a new key that opens a value."""
        key = f"sk-{group}.{sample}.{attempt}-{secrets.token_urlsafe(32)}"
        self._open[_digest(key)] = value
        return key

    def expire(self, key: str) -> T | None:
        """End a key. Returns the value that it opened."""
        digest = _digest(key)
        self._expired.append(digest)
        return self._open.pop(digest, None)

    def check(self, authorization: str | None) -> T:
        """Return the value that an Authorization header opens. Raises GatewayError."""
        key = _key(authorization or "")
        if not key:
            raise self._refused("missing", "no key: expected the header Authorization: Bearer KEY")
        digest = _digest(key)
        if digest in self._open:
            return self._open[digest]
        if digest in self._expired:
            raise self._refused("expired", "the key has expired: its episode has ended")
        raise self._refused("unknown", "the key does not belong to an episode of this worker")

    def _refused(self, reason: str, message: str) -> GatewayError:
        metrics.GATEWAY_REFUSED_KEYS.labels(reason=reason).inc()
        return refused_key(message)


@dataclass(slots=True)
class ConnectionLimiter:
    """Makes a server's connections, and closes those that do not show a key in time.

    Parameters
    ----------
    make_connection
        The server's factory.
    open_keys
        Returns the number of open keys, with which the limit grows.
    seconds
        Time after which a connection without a key is closed.

    """

    make_connection: Callable[[], RequestHandler]
    open_keys: Callable[[], int]
    seconds: float
    _unauthenticated: dict[RequestHandler, asyncio.TimerHandle] = field(default_factory=dict)

    def __call__(self) -> RequestHandler:
        """Make a connection. At the limit, close the oldest one that has not shown a key."""
        limit = MAX_UNAUTHENTICATED + MAX_UNAUTHENTICATED_PER_KEY * self.open_keys()
        if len(self._unauthenticated) >= limit:
            self._close(next(iter(self._unauthenticated)))
        connection = self.make_connection()
        loop = asyncio.get_running_loop()
        self._unauthenticated[connection] = loop.call_later(self.seconds, self._close, connection)
        return connection

    def keep(self, connection: object) -> None:
        """Keep a connection that has shown a key."""
        if isinstance(connection, RequestHandler) and connection in self._unauthenticated:
            self._unauthenticated.pop(connection).cancel()

    def _close(self, connection: RequestHandler) -> None:
        self._unauthenticated.pop(connection).cancel()
        if connection.transport is not None:
            connection.force_close()
