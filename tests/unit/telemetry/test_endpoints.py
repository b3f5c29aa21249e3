"""HTTP endpoints for the kubelet and for Prometheus."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from sluice.runtime import pod_env
from sluice.telemetry import endpoints


class Server:
    def __init__(self) -> None:
        self.ready, self.alive = "", ""
        registry = CollectorRegistry()
        Counter("sluice_things", "Things", registry=registry).inc(3)
        self.port, self.close = endpoints.listen(
            0, "127.0.0.1", ready=lambda: self.ready, alive=lambda: self.alive, registry=registry
        )

    def get(self, path: str) -> tuple[int, str]:
        try:
            url = f"http://127.0.0.1:{self.port}{path}"
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def server() -> Iterator[Server]:
    serving = Server()
    yield serving
    serving.close()


def test_a_healthy_process_answers_ok(server: Server) -> None:
    assert server.get("/healthz") == (200, "ok\n")
    assert server.get("/readyz") == (200, "ok\n")


def test_a_failed_check_is_explained(server: Server) -> None:
    server.ready = "the engine holds no weights yet"
    assert server.get("/readyz") == (503, "the engine holds no weights yet\n")
    assert server.get("/healthz")[0] == 200


def test_metrics_are_served(server: Server) -> None:
    assert "sluice_things_total 3.0" in server.get("/metrics")[1]
    assert server.get("/other")[0] == 404


def test_a_container_without_the_port_serves_nothing() -> None:
    endpoints.serve(pod_env.read("buffer", {}), ready=endpoints.healthy)()


def test_a_stuck_loop_fails_the_check() -> None:
    now = [0.0]
    pulse = endpoints.LoopWatchdog(patience=60, clock=lambda: now[0])
    now[0] = 59
    assert pulse.check() == ""
    now[0] = 61
    assert pulse.check() == "the event loop has been stuck for 61 s"
    pulse.beat()
    assert pulse.check() == ""


async def test_a_running_loop_passes_the_check() -> None:
    moments: Any = iter(range(1000))
    pulse = endpoints.LoopWatchdog(clock=lambda: next(moments))
    before = pulse._last
    async with pulse.running():
        await asyncio.sleep(0)
    assert pulse._last > before
