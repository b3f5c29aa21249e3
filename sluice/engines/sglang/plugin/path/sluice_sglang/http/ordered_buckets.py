"""Buckets are received in the order in which they are sent.

The request for a bucket reaches the engine while the bucket before is loaded, on another
connection. A server that was held up for a moment finds both requests at once and may begin with
the later one, while the bytes that arrive are those of the earlier one: buckets of one size would
get each other's weights. So each request has a number, and waits for those before it.
"""

import asyncio
from typing import Any

from .asgi import App, Receive, Scope, Send, whole
from .attempt_fence import refuse

# Communicator of a bucket, and the bucket's number there, from 0: `sluice-link-rollout-0-.../3`.
HEADER = b"x-sluice-bucket"
# Limit of the wait for the bucket before, which was requested earlier. The trainer gives up a lost
# one.
WAIT_SECONDS = 10.0
# Communicators whose numbers are kept. An engine has one sender at a time.
_KEPT = 8


class OrderedBuckets:
    """Middleware of an engine's HTTP application, which orders requests for buckets."""

    def __init__(self, app: App) -> None:
        self.app = app
        # Number of the next bucket, by communicator.
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
        # From here on the application takes requests in the order of their arrival.
        first: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

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
        """Wait for the bucket's turn. Returns why it is refused; empty if it is its turn."""
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
