"""Buckets are received in the order in which they are sent.

The request for a bucket is with the engine while the one before it is loaded, on a connection of
its own. A server that was held up for a moment finds both at once and may begin with the later one,
while the bytes that come are the earlier one's: buckets of one size would become each other's
weights. So each says its number, and waits for those before it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from .attempt_fence import Receive, Scope, Send, refuse

HEADER = b"x-sluice-bucket"
"""`sluice-link-rollout-0-.../3`: what a bucket comes over, and its number there, from 0."""
WAIT_SECONDS = 10.0
"""For the bucket before, whose request was made earlier. The trainer gives up one that is lost."""
_KEPT = 8
"""Communicators that are remembered: an engine has one sender at a time."""


class OrderedBuckets:
    """Stands before an engine's HTTP application. following: the number of the next bucket, by what
    it comes over.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        self.following: dict[str, int] = {}
        self._taken = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"] if scope["type"] == "http" else []
        turn = next((value.decode("latin-1") for name, value in headers if name == HEADER), "")
        if not turn:
            await self.app(scope, receive, send)
            return
        source, _, digits = turn.rpartition("/")
        if not digits.isdecimal():
            expected = "expected a communicator and a number, as sluice-rollout-0/3"
            await refuse(scope, send, f"{HEADER.decode()}: {turn!r}: {expected}")
            return
        number, body = int(digits), await whole(receive)
        if refusal := await self._wait(source, number):
            await refuse(scope, send, refusal)
            return
        # From here on the application takes requests in the order in which they come to it.
        first: list[Any] = [{"type": "connections.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            if not first:
                return await receive()
            await self._next(source, number)
            return first.pop()

        try:
            await self.app(scope, replay, send)
        finally:
            await self._next(source, number)

    async def _wait(self, source: str, number: int) -> str:
        """Wait for the bucket's turn. Why it is refused; empty: it is its turn."""
        self.following[source] = self.following.pop(source, 0)
        while len(self.following) > _KEPT:
            del self.following[next(iter(self.following))]
        try:
            async with asyncio.timeout(WAIT_SECONDS), self._taken:
                await self._taken.wait_for(lambda: self.following.get(source, 0) >= number)
        except TimeoutError:
            missing = self.following.get(source, 0)
            return f"{source}: bucket {missing} has not come before bucket {number}"
        if self.following.get(source, 0) > number:
            return f"{source}: bucket {number} has come before"
        return ""

    async def _next(self, source: str, number: int) -> None:
        async with self._taken:
            if self.following.get(source, 0) == number:
                self.following[source] = number + 1
                self._taken.notify_all()


async def whole(receive: Receive) -> bytes:
    """A request's body. What of it came before its client left, where one has."""
    parts = list[bytes]()
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
