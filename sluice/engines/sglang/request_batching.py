"""Sends the requests of one turn of the event loop to SGLang together, if the plugin is there.

SGLang's HTTP process does three times the work for a request that comes alone. The plugin's
`http/request_batching.py` describes the form of requests and answers.
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
# More requests in one message are hardly cheaper, and a lost connection costs no more than these.
_MOST_REQUESTS = 32
# Limit of all prompts of a message, which the server reads in one go. A longer prompt goes alone.
_MOST_TOKENS = 16_384


class _Request(NamedTuple):
    body: dict[str, Any]
    answer: asyncio.Future[tuple[int, str]]


# By the requests' positions in the message.
_Unanswered = dict[int, asyncio.Future[tuple[int, str]]]


class RequestBatcher:
    """The batched requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url + PATH
        self._waiting: list[_Request] = []
        self._sent: set[asyncio.Task[None]] = set()

    async def ask(self, body: dict[str, Any]) -> tuple[int, str]:
        """Return status and text of the answer. Raises what aiohttp raises, and OSError."""
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
            # These bytes are kept until the last answer; prompts and answers are not.
            data = json.dumps([request.body for request in some]).encode()
            unanswered = {index: request.answer for index, request in enumerate(some)}
            task = asyncio.create_task(self._answer(data, unanswered))
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)
            for request in some:
                request.answer.add_done_callback(partial(_cancel_unwanted, task, unanswered))

    async def _answer(self, data: bytes, unanswered: _Unanswered) -> None:
        """Send some requests. On return, each of them has its answer or an error."""
        error: Exception | None = None
        try:
            await self._read(data, unanswered)
        except (aiohttp.ClientPayloadError, asyncio.IncompleteReadError):
            pass  # the connection ended between two answers, or in one
        except (aiohttp.ClientError, OSError) as broken:
            error = broken
        except Exception as unreadable:
            reason = f"{type(unreadable).__name__} {unreadable}"
            error = EngineError(f"engine {self._url}: not an answer of sluice's plugin: {reason}")
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
                for index in list(unanswered):
                    _resolve(unanswered.pop(index), response.status, text)
                return
            while line := await response.content.readline():
                index, status, length = map(int, line.split())
                content = await response.content.readexactly(length)
                _resolve(unanswered.pop(index), status, content.decode(errors="replace"))
                del content  # the next answer may take an hour


def _resolve(answer: asyncio.Future[tuple[int, str]], status: int, text: str) -> None:
    if not answer.done():  # its caller may have been cancelled
        answer.set_result((status, text))


def _cancel_unwanted(
    task: asyncio.Task[None], unanswered: _Unanswered, ended: asyncio.Future[tuple[int, str]]
) -> None:
    """Close the connection if the last of its requests was cancelled."""
    if ended.cancelled() and all(answer.done() for answer in unanswered.values()):
        task.cancel()


def portions(requests: Sequence[_Request]) -> Iterator[list[_Request]]:
    """Yield the requests in lists that are sent together."""
    some, tokens = list[_Request](), 0
    for request in requests:
        length = len(request.body["input_ids"])
        if some and (len(some) == _MOST_REQUESTS or tokens + length > _MOST_TOKENS):
            yield some
            some, tokens = [], 0
        some.append(request)
        tokens += length
    if some:
        yield some
