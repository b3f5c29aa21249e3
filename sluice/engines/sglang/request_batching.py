"""Requests of one turn of the event loop go to SGLang in one, where our plugin takes them.

Of a request that comes by itself SGLang's HTTP process makes three times the work. The plugin's
`together.py` says how requests and answers look.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import aiohttp

from sluice.engines.protocol import EngineError

PATH = "/sluice_generate"
_MOST_REQUESTS = 32
"""More in one are hardly cheaper, and one connection that is lost costs no more than these."""
_MOST_TOKENS = 16_384
"""Of all their prompts, which the server reads in one go; one that is longer goes alone."""


class _Request(NamedTuple):
    body: dict[str, Any]
    answer: asyncio.Future[tuple[int, str]]


_Unanswered = dict[int, asyncio.Future[tuple[int, str]]]
"""By their places in what was sent."""


class RequestBatcher:
    """One server's requests. url: of the server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url + PATH
        self._waiting: list[_Request] = []
        self._sent: set[asyncio.Task[None]] = set()

    async def ask(self, body: dict[str, Any]) -> tuple[int, str]:
        """Status and text of the answer. Raises what aiohttp raises, and OSError."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        request = _Request(body, loop.create_future())
        self._waiting.append(request)
        return await request.answer

    async def close(self) -> None:
        for task in self._sent:
            task.cancel()
        if self._sent:
            await asyncio.wait(self._sent)

    def _send(self) -> None:
        requests = [request for request in self._waiting if not request.answer.done()]
        self._waiting.clear()
        for some in portions(requests):
            # Until the last of them is done these bytes are kept, and no prompt or answer beside.
            data = json.dumps([request.body for request in some]).encode()
            unanswered = {place: request.answer for place, request in enumerate(some)}
            task = asyncio.create_task(self._answer(data, unanswered))
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)
            for request in some:
                request.answer.add_done_callback(partial(_cancel_unwanted, task, unanswered))

    async def _answer(self, data: bytes, unanswered: _Unanswered) -> None:
        """Every request has its answer, or an error, when this has ended."""
        error: Exception | None = None
        try:
            await self._read(data, unanswered)
        except (aiohttp.ClientPayloadError, asyncio.IncompleteReadError):
            pass  # the connection ended between two answers, or in one
        except (aiohttp.ClientError, OSError) as broken:
            error = broken
        except Exception as unreadable:
            said = f"{type(unreadable).__name__} {unreadable}"
            error = EngineError(f"engine {self._url}: not an answer of our plugin: {said}")
        finally:
            lost = error or aiohttp.ServerDisconnectedError(
                "the connection ended before the answer"
            )
            for answer in unanswered.values():
                if not answer.done():
                    answer.set_exception(lost)

    async def _read(self, data: bytes, unanswered: _Unanswered) -> None:
        headers, timeout = {"Content-Type": "application/json"}, aiohttp.ClientTimeout()
        post = self._session.post(self._url, data=data, headers=headers, timeout=timeout)
        async with post as response:
            if response.status != 200:
                text = await response.text()
                for place in list(unanswered):
                    _resolve(unanswered.pop(place), response.status, text)
                return
            while line := await response.content.readline():
                place, status, length = map(int, line.split())
                content = await response.content.readexactly(length)
                _resolve(unanswered.pop(place), status, content.decode(errors="replace"))
                del content  # the next one may come in an hour


def _resolve(answer: asyncio.Future[tuple[int, str]], status: int, text: str) -> None:
    if not answer.done():  # or nobody waits for it any more
        answer.set_result((status, text))


def _cancel_unwanted(
    task: asyncio.Task[None], unanswered: _Unanswered, ended: asyncio.Future[tuple[int, str]]
) -> None:
    """End the connection where the last of its requests was given up."""
    if ended.cancelled() and all(answer.done() for answer in unanswered.values()):
        task.cancel()


def portions(requests: Sequence[_Request]) -> Iterator[list[_Request]]:
    """As many at a time as go together."""
    some, tokens = list[_Request](), 0
    for request in requests:
        own = len(request.body["input_ids"])
        if some and (len(some) == _MOST_REQUESTS or tokens + own > _MOST_TOKENS):
            yield some
            some, tokens = [], 0
        some.append(request)
        tokens += own
    if some:
        yield some
