"""A reverse proxy in front of a real engine: rules of a test decide which requests fail, and how.

def break_generation(request):
    return Answer(500, "out of memory") if request.path == "/generate" else None

async with Proxy(sglang.url) as proxy:
    proxy.rules.append(break_generation)
    async with Engine(proxy.url) as engine: ...
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from sluice.engines.sglang import request_batching
from sluice.engines.sglang.request_batching import PARTIAL


@dataclass(frozen=True)
class ProxiedRequest:
    """A request. body: its JSON, or None; number: of requests for this path so far, from 1."""

    path: str
    body: Any
    number: int

    @property
    def input_ids(self) -> list[int]:
        return list(self.body["input_ids"]) if isinstance(self.body, dict) else []


@dataclass(frozen=True)
class Answer:
    """Answered by the proxy; the engine never hears of the request."""

    status: int
    message: str = ""


@dataclass(frozen=True)
class Drop:
    """The connection ends. after: once the engine has answered, whose answer is lost; else at
    once. parts: once so many parts of a streamed answer have been passed on.
    """

    after: bool = False
    parts: int = 0


@dataclass(frozen=True)
class Delay:
    """The engine is asked so many seconds later."""

    seconds: float


Fate = Answer | Drop | Delay
Rule = Callable[[ProxiedRequest], Fate | None]


@dataclass
class Proxy:
    """The first rule that has an answer decides; a request that no rule wants is passed on."""

    target: str
    rules: list[Rule] = field(default_factory=list)
    requests: list[ProxiedRequest] = field(default_factory=list)

    async def __aenter__(self) -> Proxy:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)
        )
        self._runner = web.AppRunner(
            _app(self._serve), handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self._client.close()

    async def stop(self) -> None:
        """Stop like an engine that is gone: connections end, new ones are refused."""
        await self._runner.cleanup()

    def count(self, path: str) -> int:
        return sum(request.path == path for request in self.requests)

    def _note(self, path: str, body: Any) -> ProxiedRequest:
        self.requests.append(ProxiedRequest(path, body, self.count(path) + 1))
        return self.requests[-1]

    def _fate(self, path: str, body: Any) -> Fate | None:
        request = self._note(path, body)
        return next((fate for rule in self.rules if (fate := rule(request)) is not None), None)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.path == request_batching.PATH:
            bodies = json.loads(data)
            self._note(request.path, bodies)
            return await self._serve_many(request, bodies)
        fate = self._fate(request.path, _json(data))
        if isinstance(fate, Answer):
            return web.json_response({"error": {"message": fate.message}}, status=fate.status)
        if isinstance(fate, Delay):
            await asyncio.sleep(fate.seconds)
        if isinstance(fate, Drop) and not fate.after:
            return _dropped(request)
        headers = (
            {"Content-Type": request.headers["Content-Type"]}
            if "Content-Type" in request.headers
            else {}
        )
        url = self.target + request.path_qs
        async with self._client.request(
            request.method, url, data=data or None, headers=headers
        ) as answer:
            body = await answer.read()
            kind = answer.headers.get("Content-Type", "text/plain")
            if isinstance(fate, Drop):
                return _dropped(request)
            return web.Response(body=body, status=answer.status, headers={"Content-Type": kind})

    async def _serve_many(self, request: web.Request, bodies: list[Any]) -> web.StreamResponse:
        """Each request of a batch has its fate; if the connection of one ends, all lose it."""
        if not bodies:  # does the server take batches?
            async with self._client.post(self.target + request.path, json=bodies) as answer:
                return web.Response(body=await answer.read(), status=answer.status)
        response = web.StreamResponse()
        await response.prepare(request)

        async def respond(index: int, body: Any) -> None:
            fate = self._fate("/generate", body)
            async for status, text in self._answers_of(body, fate):
                await response.write(b"%d %d %d\n%b" % (index, status, len(text), text))

        try:
            async with asyncio.TaskGroup() as tasks:
                for index, body in enumerate(bodies):
                    tasks.create_task(respond(index, body))
        except* _DroppedError:
            assert request.transport
            request.transport.abort()
        await response.write_eof()
        return response

    async def _answers_of(self, body: Any, fate: Fate | None) -> AsyncIterator[tuple[int, bytes]]:
        """Yield status and text of the parts of an answer, and of the whole one."""
        if isinstance(fate, Answer):
            yield fate.status, json.dumps({"error": {"message": fate.message}}).encode()
            return
        if isinstance(fate, Delay):
            await asyncio.sleep(fate.seconds)
        if isinstance(fate, Drop) and not fate.after and not fate.parts:
            raise _DroppedError
        parts = 0
        async with self._client.post(self.target + request_batching.PATH, json=[body]) as answer:
            while line := await answer.content.readline():
                _, status, length = map(int, line.split())
                text = await answer.content.readexactly(length)
                parts += status == PARTIAL
                if isinstance(fate, Drop) and (status != PARTIAL or parts > fate.parts > 0):
                    raise _DroppedError
                yield status, text


class _DroppedError(Exception):
    """The connection is to end."""


def _app(serve: Any) -> web.Application:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", serve)
    return app


def _dropped(request: web.Request) -> web.Response:
    assert request.transport
    request.transport.abort()
    return web.Response()


def _json(data: bytes) -> Any:
    try:
        return json.loads(data) if data else None
    except ValueError:
        return None
