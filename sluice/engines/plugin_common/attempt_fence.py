"""An engine does what the newest attempt of its trainer says, and refuses an older one.

A trainer that was replaced may still run, on a node that is cut off, or wake up in the middle of
an update: its next bucket would change weights that its successor has brought and verified. So
each call of a trainer says who makes it, and the first one of a new attempt ends the old one's say.
Calls that do not name a trainer (requests, health checks, people) are not concerned.

This file stands in the HTTP process of every engine (a link from each plugin), with nothing of ours
beside it but that plugin.
"""

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

HEADER = b"x-sluice-source"
"""`trainer-0/3`: name and attempt."""
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
log = logging.getLogger(__name__)


class Fence:
    """Stands before an engine's HTTP application. newest: attempt, by a trainer's name."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        self.newest: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = next((self.refusal(v) for k, v in scope["headers"] if k == HEADER), "")
            if refusal:
                await refuse(scope, send, refusal)
                return
        await self.app(scope, receive, send)

    def refusal(self, source: bytes) -> str:
        """Why this source may not call; empty: it may, and older attempts may not from now on."""
        name, _, number = source.decode("latin-1").rpartition("/")
        if not number.isdecimal():
            expected = "expected a trainer's name and attempt, as trainer-0/3"
            return f"{HEADER.decode()}: {source!r}: {expected}"
        attempt, newest = int(number), self.newest.get(name, 0)
        if attempt < newest:
            return f"{name}: attempt {attempt} was replaced by attempt {newest}"
        self.newest[name] = attempt
        return ""


async def refuse(scope: Scope, send: Send, reason: str) -> None:
    """Answer a request with 409 and the reason, in the engine's place."""
    log.warning("%s is refused: %s", scope["path"], reason)
    body = json.dumps({"success": False, "message": reason}).encode()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 409, "headers": headers})
    await send({"type": "http.response.body", "body": body})
