"""Requests of one turn of the event loop go to SGLang in one, where our plugin takes them.

Of a request that comes by itself SGLang's HTTP process makes three times the work. The plugin's
`together.py` says how requests and answers look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from sluice.engines.base import EngineError

PATH = "/sluice_generate"
_MOST_REQUESTS = 32
"""More in one are hardly cheaper, and one connection that is lost costs no more than these."""
_MOST_TOKENS = 65_536
"""Of all prompts, which the server reads in one go (milliseconds), unless there is but one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    body: dict[str, Any]
    answer: asyncio.Future[tuple[int, str]]


class Together:
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
            task = asyncio.create_task(self._answer(some))
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)
            for request in some:
                request.answer.add_done_callback(partial(_cancel_unwanted, task, some))

    async def _answer(self, requests: Sequence[_Request]) -> None:
        """Every request has its answer, or an error, when this has ended."""
        error: Exception | None = None
        try:
            await self._read(requests)
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
            for request in requests:
                if not request.answer.done():
                    request.answer.set_exception(lost)

    async def _read(self, requests: Sequence[_Request]) -> None:
        bodies = [request.body for request in requests]
        timeout = aiohttp.ClientTimeout()
        async with self._session.post(self._url, json=bodies, timeout=timeout) as answer:
            if answer.status != 200:
                told = answer.status, await answer.text()
                for request in requests:
                    _resolve(request, told)
                return
            while line := await answer.content.readline():
                index, status, length = map(int, line.split())
                text = (await answer.content.readexactly(length)).decode(errors="replace")
                _resolve(requests[index], (status, text))


def _resolve(request: _Request, answer: tuple[int, str]) -> None:
    if not request.answer.done():  # or nobody waits for it any more
        request.answer.set_result(answer)


def _cancel_unwanted(
    task: asyncio.Task[None],
    requests: Sequence[_Request],
    ended: asyncio.Future[tuple[int, str]],
) -> None:
    """End the connection where the last of its requests was given up."""
    if ended.cancelled() and all(request.answer.done() for request in requests):
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
