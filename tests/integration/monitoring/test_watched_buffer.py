"""A real buffer whose trainer writes no checkpoints, scraped by a real Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.runtime.pod_env import free_port
from tests.boards import RULES
from tests.integration.buffer.conftest import make_server  # noqa: F401 - a fixture
from tests.prometheus import ALERT_SECONDS, Prometheus, hastened
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_group

JOB = {"namespace": "default", "job": "demo"}
WINDOWS = {"2h": "4s"}
# Tokens of a response: a batch takes some 4 % of the storage.
RESPONSE = 2000


@pytest.fixture
def port() -> int:
    """Port of the buffer's metrics."""
    return free_port()


@pytest.fixture
def prometheus(port: int, tmp_path: Path) -> Iterator[Prometheus]:
    rules = tmp_path / "rules.yaml"
    rules.write_text(hastened(RULES.read_text(), waits="0s", windows=WINDOWS))
    target = {"targets": [f"127.0.0.1:{port}"], "labels": JOB}
    configuration = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "sluice", "static_configs": [target]}],
    }
    with Prometheus(tmp_path, configuration) as started:
        yield started


@pytest.fixture
async def client(port: int, make_server: Callable[..., BufferProcess]) -> AsyncIterator[Client]:  # noqa: F811
    changes: dict[str, Any] = {"trainer__steps": 1000, "buffer__storage__size": "4Mi"}
    buffer = make_server({"SLUICE_PORT_METRICS": str(port)}, rows=4000, **changes)
    async with Client(buffer.start()) as client:
        yield client


async def step(client: Client, number: int) -> bool:
    """Do a worker's and a trainer's part of a step. Returns False if the batch does not fit."""
    leased = (await client.lease(count=4, version=number - 1)).groups
    if len(leased) < 4:
        return False
    await client.submit(
        make_group(lease.prompt, response=RESPONSE, version=number - 1) for lease in leased
    )
    await client.take(number)
    await client.commit(number)
    return True


async def test_steps_without_a_checkpoint_fill_the_storage(
    client: Client, prometheus: Prometheus
) -> None:
    alerts = ("SluiceCheckpointTooOld", "SluiceStorageNearlyFull")
    await asyncio.to_thread(prometheus.until_quiet, *alerts)
    number = 1
    async with asyncio.timeout(ALERT_SECONDS):
        for alert in alerts:
            while alert not in prometheus.firing():
                number += await step(client, number)
                await asyncio.sleep(0.5)
    await client.checkpoint(number - 1)
    await asyncio.to_thread(prometheus.until_quiet, *alerts)
