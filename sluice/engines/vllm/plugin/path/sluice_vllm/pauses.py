"""The engine's HTTP process tells how long it has been paused, without asking the scheduler.

The scheduler answers no call while it waits for weights, which is when a worker needs the answer.
"""

import time
from typing import Any

from .asgi import App, Receive, Scope, Send, answer

PATH = "/sluice/paused"
PAUSE, RESUME = "/pause", "/resume"


class Pauses:
    """Middleware that answers `GET /sluice/paused`.

    The answer has the seconds since the first `/pause` after a `/resume`; 0 if the engine is not
    paused.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == PATH:
            await self.tell(send)
            return
        if path == PAUSE and self.since is None:
            self.since = time.monotonic()
        await self.app(scope, receive, self.watched(send) if path == RESUME else send)

    def watched(self, send: Send) -> Send:
        """Wrap `send`, and note that a resume has been answered with 200."""

        async def noting(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self.since = None
            await send(message)

        return noting

    async def tell(self, send: Send) -> None:
        seconds = 0.0 if self.since is None else max(time.monotonic() - self.since, 0.001)
        await answer(send, 200, {"seconds": seconds})
