"""An engine's answer, whatever it is, concerns that engine alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from sluice.engines.http import connections
from sluice.engines.protocol import EngineRefusedError
from sluice.engines.sglang.control import Control


@asynccontextmanager
async def engine_that_answers(text: str) -> AsyncIterator[Control]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with connections.session() as session:
        yield Control(f"127.0.0.1:{runner.addresses[0][1]}", session, 10.0, "trainer-0/1")
    await runner.cleanup()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{}", id="no such field"),
        pytest.param('{"paths": null, "weight_version": null}', id="null in the field"),
        pytest.param("[]", id="a list"),
        pytest.param("", id="nothing"),
        pytest.param("<html>", id="no JSON"),
    ],
)
@pytest.mark.parametrize(
    "question",
    [
        pytest.param(lambda control: control.learn(), id="paths of /openapi.json"),
        pytest.param(lambda control: control.version(), id="weight_version of /model_info"),
    ],
)
async def test_an_odd_answer_is_the_failure_of_that_engine(
    question: Callable[[Control], Awaitable[object]], text: str
) -> None:
    async with engine_that_answers(text) as control:
        with pytest.raises(EngineRefusedError, match=r"/openapi.json|/model_info"):
            await question(control)
