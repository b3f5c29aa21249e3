"""Requests for responses come many in one, and each is answered as it is done.

SGLang serves HTTP in one process, which needs half a millisecond, or a whole one, for a request
that comes by itself: of 512 short ones the first are answered before the last begin. Two thirds of
that are HTTP and the checks of FastAPI, and are saved here.

A request is a JSON list of what `/generate` takes. The answer is a sequence: for each, as soon as
it is done, a line `INDEX STATUS LENGTH` and as many bytes, which are what `/generate` answers.
INDEX is its place in the list, from 0. An empty list asks if the server can do this.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .attempt_fence import Receive, Scope, Send
from .control_priority import RequestQueue
from .ordered_buckets import whole

PATH = "/sluice_generate"
Generate = Callable[[dict[str, Any], Scope, Receive], Awaitable[tuple[int, bytes]]]
"""Status and body of the answer to one request."""
log = logging.getLogger(__name__)


class RequestBatching:
    """Stands before an engine's HTTP application."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        turns: RequestQueue,
        generate: Generate,
    ) -> None:
        self.app = app
        self.turns = turns
        self.generate = generate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        requests = _requests(await whole(receive))
        status = 400 if requests is None else 200
        headers = [(b"content-type", b"application/octet-stream")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if requests:
            await self._answer(requests, scope, receive, send)
            return
        body = b"" if requests == [] else f"{PATH}: expected a JSON list of objects".encode()
        await send({"type": "http.response.body", "body": body})

    async def _answer(
        self, requests: list[dict[str, Any]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answers that are done in one turn of the loop go back in one piece."""
        done, news = list[bytes](), asyncio.Event()

        async def one(index: int, request: dict[str, Any]) -> None:
            await self.turns.come()
            try:
                status, answer = await self.generate(request, scope, receive)
            except Exception as error:
                log.exception("request %s", request.get("rid"))
                status, answer = 500, f"{type(error).__name__}: {error}".encode()
            done.append(b"%d %d %d\n%b" % (index, status, len(answer), answer))
            news.set()

        missing = len(requests)
        async with asyncio.TaskGroup() as tasks:
            for index, request in enumerate(requests):
                tasks.create_task(one(index, request))
            requests.clear()  # a prompt is not kept until the last of them is answered
            while missing:
                await news.wait()
                news.clear()
                missing -= len(done)
                body = b"".join(done)
                done.clear()
                await send({"type": "http.response.body", "body": body, "more_body": missing > 0})
                del body  # the next one may come in an hour


def _requests(body: bytes) -> list[dict[str, Any]] | None:
    """None: there are none in it."""
    try:
        requests = json.loads(body)
    except ValueError:
        return None
    is_list = isinstance(requests, list) and all(isinstance(one, dict) for one in requests)
    return requests if is_list else None
