"""Fixtures of the rollout worker's tests. The buffer's own tools start the buffer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.protocol import Client
from tests.integration.conftest import Server
from tests.integration.house import Rendezvous
from tests.integration.rollout.pods import House, Pod, job


@pytest.fixture
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client of the test's `server`, else of SGLang."""
    server: Server = request.getfixturevalue(
        "server" if "server" in request.fixturenames else "sglang"
    )
    async with server.engine.client(server.url) as engine:
        await engine.wait_ready(30.0)
        yield engine


@pytest.fixture
async def house(
    tmp_path: Path, model: Path, rendezvous: Rendezvous
) -> AsyncIterator[Callable[..., House]]:
    """Makes houses: a job (its changes as `rollout__batchSize=1`), its buffer, its rendezvous."""
    houses: list[House] = []

    def make(**changes: Any) -> House:
        houses.append(House(job(tmp_path, model, **changes), tmp_path, rendezvous))
        return houses[-1]

    yield make
    for one in houses:
        if one.buffer.process:
            one.buffer.process.kill()
            one.buffer.process.wait(10)


@pytest.fixture
def pod() -> Iterator[Callable[..., Pod]]:
    """Starts `python -m sluice_rollout`; all are killed at the end."""
    pods: list[Pod] = []

    def make(house: House, engine_url: str, **environment: str) -> Pod:
        pods.append(Pod(house, engine_url, **environment))
        return pods[-1]

    yield make
    for one in pods:
        one.kill()
