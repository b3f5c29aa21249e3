"""An engine obeys the newest attempt of its trainer and refuses older ones.

A trainer that was replaced may still run on a node that is cut off, or wake up in the middle of an
update. Its next bucket would change weights that its successor has sent and verified. So each call
of a trainer names the attempt that makes it, and the first call of a new attempt ends the rights of
older ones. Calls that name no trainer (requests, health checks, people) always pass.

This file runs in the HTTP process of every engine, linked from each plugin, and imports the
standard library only.
"""

import logging

from .asgi import App, Receive, Scope, Send, answer

# Name and attempt of a trainer: `trainer-0/3`.
HEADER = b"x-sluice-source"
log = logging.getLogger(__name__)


class Attempts:
    """The newest attempt of each trainer that has called."""

    def __init__(self) -> None:
        # By the trainer's name.
        self.newest: dict[str, int] = {}

    def refusal(self, source: bytes) -> str:
        """Return why this source may not call; empty if it may.

        From then on, older attempts of the same trainer may not.
        """
        name, _, number = source.decode("latin-1").rpartition("/")
        if not number.isdecimal():
            expected = "expected a trainer's name and attempt, as trainer-0/3"
            return f"{HEADER.decode()}: {source!r}: {expected}"
        attempt, newest = int(number), self.newest.get(name, 0)
        if attempt < newest:
            return f"{name}: attempt {attempt} was replaced by attempt {newest}"
        self.newest[name] = attempt
        return ""


class Fence:
    """Middleware of an engine's HTTP application, which refuses replaced trainers."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.attempts = Attempts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sources = (value for key, value in scope["headers"] if key == HEADER)
            refusal = next(map(self.attempts.refusal, sources), "")
            if refusal:
                await refuse(scope, send, refusal)
                return
        await self.app(scope, receive, send)


async def refuse(scope: Scope, send: Send, reason: str) -> None:
    """Answer a request with 409 and the reason, in the engine's place."""
    log.warning("%s is refused: %s", scope["path"], reason)
    await answer(send, 409, {"success": False, "message": reason})
