"""Sends the requests of one turn of the event loop to SGLang together, if the plugin is there.

SGLang's HTTP process does three times the work for a request that comes alone. The plugin's
`http/request_batching.py` describes the form of requests and answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import aiohttp

from sluice.engines.protocol import EngineError

PATH = "/sluice_generate"
# More requests in one message are hardly cheaper, and a lost connection costs no more than these.
_MOST_REQUESTS = 32
# Limit of all prompts of a message, which the server reads in one go. A longer prompt goes alone.
_MOST_TOKENS = 16_384


# Status of a part of an answer.
PARTIAL = 206
OnPart = Callable[[str], None]


class _Pending(NamedTuple):
    answer: asyncio.Future[tuple[int, str]]
    on_part: OnPart | None  # gets the parts of the answer


class _Request(NamedTuple):
    body: dict[str, Any]
    pending: _Pending


# By the requests' positions in the message.
_Unanswered = dict[int, _Pending]


class RequestBatcher:
    """The batched requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url + PATH
        self._waiting: list[_Request] = []
        self._sent: set[asyncio.Task[None]] = set()

    async def ask(self, body: dict[str, Any], on_part: OnPart | None = None) -> tuple[int, str]:
        """Return status and text of the answer. Raises what aiohttp raises, and OSError.

        `on_part` gets the text of each part of an answer to a body with `stream`.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        pending = _Pending(loop.create_future(), on_part)
        self._waiting.append(_Request(body, pending))
        return await pending.answer

    async def close(self) -> None:
        for task in self._sent:
            task.cancel()
        if self._sent:
            await asyncio.wait(self._sent)

    def _send(self) -> None:
        requests = [request for request in self._waiting if not request.pending.answer.done()]
        self._waiting.clear()
        for some in portions(requests):
            # These bytes are kept until the last answer; prompts and answers are not.
            data = json.dumps([request.body for request in some]).encode()
            unanswered = {index: request.pending for index, request in enumerate(some)}
            task = asyncio.create_task(self._answer(data, unanswered))
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)
            for request in some:
                request.pending.answer.add_done_callback(
                    partial(_cancel_unwanted, task, unanswered)
                )

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
            for pending in unanswered.values():
                if not pending.answer.done():
                    pending.answer.set_exception(lost)

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
                text = content.decode(errors="replace")
                if status == PARTIAL:
                    _hand_over(unanswered[index], text)
                else:
                    _resolve(unanswered.pop(index), status, text)
                del content, text  # the next answer may take an hour


def _resolve(pending: _Pending, status: int, text: str) -> None:
    if not pending.answer.done():  # its caller may have been cancelled
        pending.answer.set_result((status, text))


def _hand_over(pending: _Pending, text: str) -> None:
    """Pass a part of an answer on. An error in it fails this request alone."""
    if pending.answer.done() or pending.on_part is None:
        return
    try:
        pending.on_part(text)
    except Exception as error:
        pending.answer.set_exception(error)


def _cancel_unwanted(
    task: asyncio.Task[None], unanswered: _Unanswered, ended: asyncio.Future[tuple[int, str]]
) -> None:
    """Close the connection if the last of its requests was cancelled."""
    if ended.cancelled() and all(pending.answer.done() for pending in unanswered.values()):
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
