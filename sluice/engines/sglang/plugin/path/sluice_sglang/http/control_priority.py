"""Control requests and probes bypass the generation queue.

SGLang serves HTTP in one process, whose event loop begins with all requests that have come before
it looks at anything else. Of 512 requests that come at once, as they do after a step, a pause or a
probe waits for the last. Here only a few requests begin in each turn of the loop, and anything else
that has come is looked at after these.

No request begins in a pause. SGLang would begin with it and make it wait for a lock that the
control requests of an update need too, and that goes to one of them in each turn of the loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from .asgi import App, Receive, Scope, Send

PATH = "/generate"
ABORT = "/abort_request"
# Requests that begin in a turn of the loop: half a millisecond each.
_AT_ONCE = 4
# A paused engine is checked again after this time.
_LOOK_SECONDS = 0.005


class RequestQueue:
    """Requests that have not begun, oldest first."""

    def __init__(self, paused: Callable[[], bool]) -> None:
        # True while the engine lets no new request generate.
        self.paused = paused
        self.waiting: deque[asyncio.Future[None]] = deque()
        # Set while requests wait.
        self._next: asyncio.Handle | None = None

    async def wait(self) -> None:
        """Wait until this request may begin."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.call_soon(self._turn, loop)
        begins = loop.create_future()
        self.waiting.append(begins)
        await begins

    async def release_all(self) -> None:
        """Let all waiting requests begin."""
        self._begin(len(self.waiting))
        await asyncio.sleep(0)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let a few requests begin, and continue in the loop's next turn."""
        if self.waiting and self.paused():
            self._next = loop.call_later(_LOOK_SECONDS, self._turn, loop)
            return
        self._begin(_AT_ONCE)
        self._next = loop.call_soon(self._turn, loop) if self.waiting else None

    def _begin(self, most: int) -> None:
        begun = 0
        while self.waiting and begun < most:
            begins = self.waiting.popleft()
            if not begins.done():  # its task may have been cancelled
                begins.set_result(None)
                begun += 1


class ControlPriority:
    """Middleware of an engine's HTTP application, which queues requests to generate."""

    def __init__(self, app: App, queue: RequestQueue) -> None:
        self.app = app
        self.queue = queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == PATH:
            await self.queue.wait()
        elif path == ABORT:
            await self.queue.release_all()  # SGLang aborts only requests that it has begun
        await self.app(scope, receive, send)
