"""HTTP for the kubelet and for Prometheus: /healthz, /readyz, /metrics."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

Check = Callable[[], str]
"""Why not, in words; empty: all is well."""


@contextlib.asynccontextmanager
async def serving(
    host: str, port: int, registry: CollectorRegistry, *, alive: Check, ready: Check
) -> AsyncIterator[None]:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/healthz", _answer(alive)), web.get("/readyz", _answer(ready))]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


def _answer(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        why = check()
        return web.Response(text=(why or "ok") + "\n", status=503 if why else 200)

    return handle
