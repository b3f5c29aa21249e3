"""Keys of episodes: who holds one may ask for its episode, until that ends, and for nothing else.

A key names group, sample and attempt for people who read logs, and ends in 256 random bits. Keys
are looked up and compared by their SHA-256: how long that takes depends on digests that nobody can
aim at, so it tells nothing of any key.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sluice_rollout import metrics
from sluice_rollout.gateway.errors import GatewayError, refused_key

T = TypeVar("T")
_REMEMBERED = 10_000
_BEARER, _BASIC = "Bearer ", "Basic "


def _key(authorization: str) -> str:
    """The key of a header: a bearer's, or the user's name in an address, which clients send so."""
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
class Keys(Generic[T]):
    """The keys of a worker, and what each opens. Expired ones are remembered for their message."""

    _open: dict[bytes, T] = field(default_factory=dict)
    _expired: deque[bytes] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    def issue(self, group: int, sample: int, attempt: int, value: T) -> str:
        """A new key."""
        key = f"sk-{group}.{sample}.{attempt}-{secrets.token_urlsafe(32)}"
        self._open[_digest(key)] = value
        return key

    def expire(self, key: str) -> T | None:
        """End a key; what it opened."""
        digest = _digest(key)
        self._expired.append(digest)
        return self._open.pop(digest, None)

    def check(self, authorization: str | None) -> T:
        """Look up what the key of this header opens. Raises GatewayError."""
        key = _key(authorization or "")
        if not key:
            raise self._refused("missing", "no key: expected the header Authorization: Bearer KEY")
        digest = _digest(key)
        if digest in self._open:
            return self._open[digest]
        if digest in self._expired:
            raise self._refused("expired", "the key has expired: its episode has ended")
        raise self._refused("unknown", "the key is of no episode of this worker")

    def _refused(self, reason: str, message: str) -> GatewayError:
        metrics.GATEWAY_REFUSED_KEYS.labels(reason=reason).inc()
        return refused_key(message)
