"""Tokens per second of a pool, from the counters of its engines."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from sluice_operator.plan import KubeObject
from sluice_operator.plan.facts.model import PoolKey
from sluice_operator.token_meter import TokenMeter, counted, generated_tokens
from tests.unit.operator.pool_world import engine_pod

POOL = PoolKey("default", "shared")
METRICS = """\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 128.0
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m",is_streaming="false"} 7557.0
sglang:generation_tokens_total{model_name="m",is_streaming="true"} 3.0
"""


def pod(number: int, *, ready: bool = True) -> KubeObject:
    return engine_pod(number, ready=ready, podIP=f"10.0.0.{number}")


class Engines:
    """Counters of engines, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tokens: dict[str, float | None] = {}

    async def ask(self, url: str) -> float | None:
        return self.tokens[url]

    def count(self, *tokens: float | None) -> None:
        self.tokens = {f"http://10.0.0.{i}:30000": count for i, count in enumerate(tokens)}
        self.now += 10

    def clock(self) -> float:
        return self.now


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def meter(engines: Engines) -> TokenMeter:
    return TokenMeter(engines.ask, engines.clock)


async def test_the_rate_is_the_sum_of_the_differences(engines: Engines, meter: TokenMeter) -> None:
    pods = {POOL: [pod(0), pod(1)]}
    engines.count(100, 500)
    assert await meter.measure(pods) == []
    assert meter.rate(POOL) is None
    engines.count(300, 1500)
    assert await meter.measure(pods) == [POOL]
    assert meter.rate(POOL) == 120
    engines.count(500, 2500)
    assert await meter.measure(pods) == []


@pytest.mark.parametrize("second", [None, 3.0], ids=["silent", "restarted"])
async def test_an_engine_without_two_answers_counts_nothing(
    engines: Engines, meter: TokenMeter, second: float | None
) -> None:
    pods = {POOL: [pod(0), pod(1)]}
    engines.count(100, 500)
    await meter.measure(pods)
    engines.count(300, second)
    await meter.measure(pods)
    assert meter.rate(POOL) == 20


async def test_engines_that_are_not_ready_are_not_asked(
    engines: Engines, meter: TokenMeter
) -> None:
    assert await meter.measure({POOL: [pod(0, ready=False), engine_pod(1)]}) == []
    assert meter.rate(POOL) is None


def test_all_series_of_the_counter_are_summed_and_no_others() -> None:
    assert counted(METRICS) == 7560
    assert counted("") == 0


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """An engine's HTTP server."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


async def test_an_engine_is_asked_over_http(server: str) -> None:
    assert await generated_tokens(server) == 7560


@pytest.mark.parametrize("path", ["/other", ":1"], ids=["404", "no address"])
async def test_an_engine_that_does_not_answer_has_no_count(server: str, path: str) -> None:
    assert await generated_tokens(server + path) is None
