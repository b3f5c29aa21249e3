"""Connections to the engine: SGLang closes idle ones after 5 s, and a request that meets the closing is lost."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sluice_rollout import engine as module
from sluice_rollout.engine import Engine

SGLANG_CLOSES_AFTER = 5.0


@pytest.mark.parametrize(("idle", "connections"), [(0.0, 1), (0.3, 2)])
async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, idle: float, connections: int
) -> None:
    assert module.KEEP_ALIVE_SECONDS < SGLANG_CLOSES_AFTER
    monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.1)
    seen: set[object] = set()

    async def health(request: web.Request) -> web.Response:
        seen.add(request.transport)
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    async with TestServer(app) as server, Engine(str(server.make_url("/"))) as engine:
        assert await engine.health(1.0) == (True, "/health answered 200")
        await asyncio.sleep(idle)
        assert await engine.health(1.0) == (True, "/health answered 200")
    assert len(seen) == connections
