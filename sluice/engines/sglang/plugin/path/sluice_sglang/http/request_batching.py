"""Requests to generate come many in one message, and each is answered once it is done.

SGLang serves HTTP in one process, which needs half a millisecond to a whole one for a request that
comes alone: of 512 short requests the first are answered before the last begin. Two thirds of that
time are HTTP and the checks of FastAPI, which this middleware saves.

A message is a JSON list of bodies of `/generate`. The answer is a sequence: for each request, once
it is done, a line `INDEX STATUS LENGTH` and as many bytes, which are the answer of `/generate`.
INDEX is the request's position in the list, from 0. An empty list asks whether the server supports
this.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .asgi import App, Receive, Scope, Send, whole
from .control_priority import RequestQueue

PATH = "/sluice_generate"
# Returns status and body of the answer to one request.
Generate = Callable[[dict[str, Any], Scope, Receive], Awaitable[tuple[int, bytes]]]
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
        body = b"" if requests == [] else f"{PATH}: expected a JSON list of objects".encode()
        await send({"type": "http.response.body", "body": body})

    async def _answer(
        self, requests: list[dict[str, Any]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer all requests. Answers that are done in one turn of the loop are sent together."""
        done, has_answers = list[bytes](), asyncio.Event()

        async def answer_one(index: int, request: dict[str, Any]) -> None:
            await self.queue.wait()
            try:
                status, answer = await self.generate(request, scope, receive)
            except Exception as error:
                log.exception("request %s", request.get("rid"))
                status, answer = 500, f"{type(error).__name__}: {error}".encode()
            done.append(b"%d %d %d\n%b" % (index, status, len(answer), answer))
            has_answers.set()

        missing = len(requests)
        async with asyncio.TaskGroup() as tasks:
            for index, request in enumerate(requests):
                tasks.create_task(answer_one(index, request))
            requests.clear()  # frees each prompt once its request is answered
            while missing:
                await has_answers.wait()
                has_answers.clear()
                missing -= len(done)
                body = b"".join(done)
                done.clear()
                await send({"type": "http.response.body", "body": body, "more_body": missing > 0})
                del body  # the next answer may take an hour


def _requests(body: bytes) -> list[dict[str, Any]] | None:
    """Return the requests of a body; None if it is not a list of objects."""
    try:
        requests = json.loads(body)
    except ValueError:
        return None
    is_list = isinstance(requests, list) and all(isinstance(request, dict) for request in requests)
    return requests if is_list else None
