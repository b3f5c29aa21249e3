"""Fixtures of the rollout worker's tests. The buffer's own tools start the buffer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.protocol import Client
from tests.integration.conftest import Server
from tests.integration.rendezvous_server import Rendezvous
from tests.integration.rollout.pods import Pod, Services, job


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
async def make_services(
    tmp_path: Path, model: Path, rendezvous: Rendezvous
) -> AsyncIterator[Callable[..., Services]]:
    """Makes the services of a job (its changes as `rollout__batchSize=1`)."""
    stacks: list[Services] = []

    def make(**changes: Any) -> Services:
        stacks.append(Services(job(tmp_path, model, **changes), tmp_path, rendezvous))
        return stacks[-1]

    yield make
    for services in stacks:
        if services.buffer.process:
            services.buffer.process.kill()
            services.buffer.process.wait(10)


@pytest.fixture
def start_pod() -> Iterator[Callable[..., Pod]]:
    """Starts `python -m sluice_rollout`, which is killed after the test."""
    pods: list[Pod] = []

    def make(services: Services, engine_url: str, **environment: str) -> Pod:
        pods.append(Pod(services, engine_url, **environment))
        return pods[-1]

    yield make
    for pod in pods:
        pod.kill()
