"""Connections to the engine: SGLang closes idle ones after 5 s, and a request may meet the
closing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sluice.engines.http import connections
from sluice.engines.protocol import EngineError
from sluice.engines.sglang.client import Client

SGLANG_CLOSES_AFTER = 5.0


@pytest.mark.parametrize(("idle", "expected"), [(0.0, 1), (0.3, 2)])
async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, idle: float, expected: int
) -> None:
    assert connections.KEEP_ALIVE_SECONDS < SGLANG_CLOSES_AFTER
    monkeypatch.setattr(connections, "KEEP_ALIVE_SECONDS", 0.1 if idle else 60.0)
    seen: set[object] = set()

    async def health(request: web.Request) -> web.Response:
        seen.add(request.transport)
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    async with TestServer(app) as server, Client(str(server.make_url("/"))) as engine:
        assert await engine.health(20.0) == (True, "/health answered 200")
        await asyncio.sleep(idle)
        assert await engine.health(20.0) == (True, "/health answered 200")
    assert len(seen) == expected


async def test_a_worker_says_why_the_engine_refuses_its_job() -> None:
    async def full(_: web.Request) -> web.Response:
        sentence = "this pool has 4 jobs already: raise its maxAdapters"
        return web.json_response({"success": False, "message": sentence}, status=429)

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/server_info", full)
    async with TestServer(app) as server, Client(str(server.make_url("/"))) as engine:
        with pytest.raises(EngineError, match="answered 429: this pool has 4 jobs already: raise"):
            await engine.wait_ready(5.0)


@asynccontextmanager
async def closing(answers: list[bool]) -> AsyncIterator[str]:
    """A server that answers a request if the list says so, else closes the connection that
    brought it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (await reader.read(65536)) and answers and answers.pop(0):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_request_that_met_the_closing_of_its_connection_is_sent_again() -> None:
    answers = [True, False, True]
    async with closing(answers) as url, Client(url) as engine:
        await engine.abort("one")
        await engine.abort("two")
    assert not answers, "three requests for two calls"


async def test_an_engine_that_closes_every_connection_has_failed() -> None:
    answers = [False, False, True]
    async with closing(answers) as url, Client(url) as engine:
        with pytest.raises(EngineError, match="ServerDisconnectedError"):
            await engine.abort("one")
    assert answers == [True], "asked twice, not more"
