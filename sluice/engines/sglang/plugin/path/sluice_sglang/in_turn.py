"""Words of a weight update, and probes, overtake requests for responses.

SGLang serves HTTP in one process, whose event loop begins with all requests that have come before
it looks at anything else: of 512 that come at once, as they do after a step, a pause or a probe
waits for the last. Here a few begin in each turn of the loop, so that whatever else has come is
looked at after those few.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from .attempts import Receive, Scope, Send

PATH = "/generate"
_AT_ONCE = 4
"""Requests that begin in a turn of the loop: half a millisecond each."""


class InTurn:
    """Stands before an engine's HTTP application. waiting: requests that have not begun, the oldest
    first. While there are any, the loop's next turn lets some begin.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PATH:
            loop = asyncio.get_running_loop()
            if not self.waiting:
                loop.call_soon(self._turn, loop)
            begins = loop.create_future()
            self.waiting.append(begins)
            await begins
        await self.app(scope, receive, send)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let a few begin, and look again in the loop's next turn."""
        begun = 0
        while self.waiting and begun < _AT_ONCE:
            begins = self.waiting.popleft()
            if not begins.done():  # or its task was cancelled
                begins.set_result(None)
                begun += 1
        if self.waiting:
            loop.call_soon(self._turn, loop)
