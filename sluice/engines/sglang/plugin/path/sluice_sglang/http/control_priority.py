"""Words of a weight update, and probes, overtake requests for responses.

SGLang serves HTTP in one process, whose event loop begins with all requests that have come before
it looks at anything else: of 512 that come at once, as they do after a step, a pause or a probe
waits for the last. Here a few begin in each turn of the loop, so that whatever else has come is
looked at after those few.

In a pause none begins. SGLang would begin with it and have it wait for its lock, which the words
of an update need, too, and which goes on to one in a turn of the loop.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from .attempt_fence import Receive, Scope, Send

PATH = "/generate"
ABORT = "/abort_request"
_AT_ONCE = 4
"""Requests that begin in a turn of the loop: half a millisecond each."""
_LOOK_SECONDS = 0.005
"""Time after which a paused engine is looked at again."""


class RequestQueue:
    """The order of requests. waiting: those that have not begun, the oldest first.

    paused: true while the engine keeps new requests from generating.
    """

    def __init__(self, paused: Callable[[], bool]) -> None:
        self.paused = paused
        self.waiting: deque[asyncio.Future[None]] = deque()
        self._next: asyncio.Handle | None = None
        """There is one while requests wait."""

    async def come(self) -> None:
        """Wait until it is this request's turn."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.call_soon(self._turn, loop)
        begins = loop.create_future()
        self.waiting.append(begins)
        await begins

    async def all(self) -> None:
        """Let all begin that wait."""
        self._begin(len(self.waiting))
        await asyncio.sleep(0)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let a few begin, and look again in the loop's next turn."""
        if self.waiting and self.paused():
            self._next = loop.call_later(_LOOK_SECONDS, self._turn, loop)
            return
        self._begin(_AT_ONCE)
        self._next = loop.call_soon(self._turn, loop) if self.waiting else None

    def _begin(self, most: int) -> None:
        begun = 0
        while self.waiting and begun < most:
            begins = self.waiting.popleft()
            if not begins.done():  # or its task was cancelled
                begins.set_result(None)
                begun += 1


class ControlPriority:
    """Stands before an engine's HTTP application."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], turns: RequestQueue
    ) -> None:
        self.app = app
        self.turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == PATH:
            await self.turns.come()
        elif path == ABORT:
            await self.turns.all()  # SGLang aborts what it has begun with
        await self.app(scope, receive, send)
