"""Requests to generate come many in one message, and each is answered once it is done.

SGLang serves HTTP in one process, which needs half a millisecond to a whole one for a request that
comes alone: of 512 short requests the first are answered before the last begin. Two thirds of that
time are HTTP and the checks of FastAPI, which this middleware saves.

A message is a JSON list of bodies of `/generate`. The answer is a sequence: for each request, once
it is done, a line `INDEX STATUS LENGTH` and as many bytes, which are the answer of `/generate`.
INDEX is the request's position in the list, from 0. An empty list asks whether the server supports
this; the answer is a JSON object.

A request with `stream` is also answered by parts, with the status 206, as its tokens come. The last
answer is the same as without `stream`, and complete.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from .asgi import App, Receive, Scope, Send, whole
from .control_priority import RequestQueue

PATH = "/sluice_generate"
# Status of a part of an answer.
PARTIAL = 206
# Sends a part of an answer.
SendPart = Callable[[bytes], None]
# Returns status and body of the answer to one request.
Generate = Callable[[dict[str, Any], Scope, Receive, SendPart], Awaitable[tuple[int, bytes]]]
log = logging.getLogger(__name__)


class RequestBatching:
    """Middleware of an engine's HTTP application, which answers batched requests."""

    def __init__(
        self,
        app: App,
        queue: RequestQueue,
        generate: Generate,
    ) -> None:
        self.app = app
        self.queue = queue
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
        expected = f"{PATH}: expected a JSON list of objects".encode()
        body = json.dumps({"parts": True}).encode() if requests == [] else expected
        await send({"type": "http.response.body", "body": body})

    async def _answer(
        self, requests: list[dict[str, Any]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer all requests. What is ready in one turn of the loop is sent together."""
        frames, has_frames = list[bytes](), asyncio.Event()
        missing = len(requests)

        def add(index: int, status: int, content: bytes) -> None:
            frames.append(b"%d %d %d\n%b" % (index, status, len(content), content))
            has_frames.set()

        async def answer_one(index: int, request: dict[str, Any]) -> None:
            nonlocal missing
            await self.queue.wait()
            try:
                status, answer = await self.generate(
                    request, scope, receive, partial(add, index, PARTIAL)
                )
            except Exception as error:
                log.exception("request %s", request.get("rid"))
                status, answer = 500, f"{type(error).__name__}: {error}".encode()
            missing -= 1
            add(index, status, answer)

        async with asyncio.TaskGroup() as tasks:
            for index, request in enumerate(requests):
                tasks.create_task(answer_one(index, request))
            requests.clear()  # frees each prompt once its request is answered
            more = True
            while more:
                await has_frames.wait()
                has_frames.clear()
                more = missing > 0
                body = b"".join(frames)
                frames.clear()
                await send({"type": "http.response.body", "body": body, "more_body": more})
                del body  # the next answer may take an hour


def _requests(body: bytes) -> list[dict[str, Any]] | None:
    """Return the requests of a body; None if it is not a list of objects."""
    try:
        requests = json.loads(body)
    except ValueError:
        return None
    is_list = isinstance(requests, list) and all(isinstance(request, dict) for request in requests)
    return requests if is_list else None
