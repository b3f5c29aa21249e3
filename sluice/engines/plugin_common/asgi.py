"""What a middleware of an engine's HTTP application reads and answers.

This file runs in the HTTP process of every engine, linked from each plugin, and imports the
standard library only.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def whole(receive: Receive) -> bytes:
    """Return a request's body, or the part that came before its client left."""
    parts = list[bytes]()
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def answer(send: Send, status: int, body: dict[str, Any]) -> None:
    """Answer a request with a status and a JSON object."""
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
