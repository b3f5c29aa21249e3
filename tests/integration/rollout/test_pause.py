"""An engine that is paused for a weight update, and what its samples say of the weights then."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.sglang import client as engine_module
from sluice.engines.sglang.client import Client
from sluice.samples.sample import Purpose, Sample
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout.worker import WorkerError
from tests.integration.engines import Sglang, call, distance, log_probs, tolerance
from tests.integration.rendezvous_server import DEADLINE
from tests.integration.rollout.pods import Services, leases, submitted
from tests.integration.weights.conftest import make_sender as make_sender
from tests.integration.weights.tools import begin, publish

ASYNC = {"rollout__mode": "async", "rollout__maxStaleness": 1}
# Looks often, and takes an engine for stalled at once: what takes minutes takes seconds.
IMPATIENT = {
    "rollout__health__periodSeconds": 0.05,
    "rollout__health__stallSeconds": 0.001,
    "rollout__health__generateSeconds": 3.0,
}
LONG = {**ASYNC, "rollout__sampling__maxResponseTokens": 3000}
MIDDLE = {**ASYNC, "rollout__sampling__maxResponseTokens": 600}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the engine's pause takes less time."""
    monkeypatch.setattr(engine_module, "PROBE_SECONDS", 0.5)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_server_says_so_and_one_that_goes_on_does_not(
    engine: Client, sglang: Sglang, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(engine_module, "PROBE_SECONDS", 1.0)
    assert await engine.paused_seconds() == 0
    call(sglang.url + "/pause_generation", {"mode": mode})
    assert (first := await engine.paused_seconds()) >= 1
    assert await engine.paused_seconds() > first
    assert await engine.answers()
    call(sglang.url + "/continue_generation", {})
    async with asyncio.timeout(DEADLINE):
        while await engine.paused_seconds():
            await asyncio.sleep(0.01)
    call(sglang.url + "/pause_generation", {"mode": mode})
    assert await engine.paused_seconds() < 3 * first


@pytest.mark.usefixtures("impatient")
async def test_a_paused_engine_is_well_until_its_trainers_successor_comes(
    make_services: Callable[..., Services],
    engine: Client,
    other_model: Path,
    make_sender: Callable[..., Any],
) -> None:
    services = make_services(**MIDDLE, **IMPATIENT)
    async with (
        await services.start_buffer_with_batch() as client,
        services.working(engine) as (worker, end),
    ):
        await leases(worker, 4)
        assert (
            await begin(make_sender(attempt=1, timeoutSeconds=30), 1, joiners_only=False) == 1
        )  # and that trainer is heard of no more
        async with asyncio.timeout(60):
            while await engine.paused_seconds() < 10 * worker.health.policy.failure_threshold * 0.5:
                await asyncio.sleep(0.1)
        assert worker.health.unhealthy == ""
        assert worker.lost is None
        update = await publish(make_sender(attempt=2, timeoutSeconds=30), 1, other_model)
        assert list(update.engines) == ["rollout-0"]
        await client.commit(1)
        assert (await client.take(2, wait=60)).state == pb.TakeBatchResponse.STATE_READY
        await end()
        assert (await client.stats()).counters["leases_expired"] == 0


@pytest.mark.usefixtures("impatient")
async def test_a_pause_that_nobody_ends_is_the_engines_end(
    make_services: Callable[..., Services], engine: Client, sglang: Sglang
) -> None:
    services = make_services(**LONG, **IMPATIENT)
    async with (
        await services.start_buffer() as client,
        services.worker(engine) as (worker, membership),
    ):
        worker.health.pause_seconds = 2.0
        work = asyncio.create_task(worker.run(asyncio.Event()))
        await asyncio.wait_for(membership.connected.wait(), 10)
        await services.rendezvous.serve(0)
        await leases(worker, 4)
        await sglang.running(8)
        call(sglang.url + "/pause_generation", {"mode": "in_place"})
        with pytest.raises(WorkerError, match=r"paused for \d+ s, and no trainer has resumed it"):
            await asyncio.wait_for(work, 60)
        stats = await client.stats()
        assert (stats.leases, stats.counters["groups_returned"]) == (0, 4)
    call(sglang.url + "/continue_generation", {})
    await sglang.idle(30)


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_hangs_and_is_not_paused_is_found_at_once_and_its_groups_go_back(
    make_services: Callable[..., Services], engine: Client, sglang: Sglang
) -> None:
    services = make_services(**LONG, **IMPATIENT)
    async with (
        await services.start_buffer() as client,
        services.worker(engine) as (worker, membership),
    ):
        work = asyncio.create_task(worker.run(asyncio.Event()))
        await asyncio.wait_for(membership.connected.wait(), 10)
        await services.rendezvous.serve(0)
        await leases(worker, 4)
        sglang.part("scheduler").send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(WorkerError, match="3 health checks failed: /health_generate"):
                await asyncio.wait_for(work, 60)
        finally:
            sglang.part("scheduler").send_signal(signal.SIGCONT)
        stats = await client.stats()
        assert (stats.leases, stats.counters["groups_returned"]) == (0, 4)
    await sglang.idle(30)


def error_of(sample: Sample, weights: dict[int, Path]) -> float:
    """Largest distance of its log-probs from those of the weights that its spans name."""
    expected: list[float] = []
    for span in sample.weight_versions:
        everything = log_probs(
            weights[span.version], sample.tokens.tolist(), sample.response_length
        )
        expected += everything[span.start : span.end]
    return distance(sample.rollout_log_probs.tolist(), expected)


async def test_samples_of_an_evaluation_tell_which_weights_sampled_them(
    make_services: Callable[..., Services], engine: Client, sglang: Sglang, model: Path,
    other_model: Path, make_sender: Callable[..., Any],
) -> None:  # fmt: skip
    services = make_services(
        **(MIDDLE | {"rollout__concurrency": 16}), evaluation={"everySteps": 1}
    )
    async with (
        await services.start_buffer_with_batch(),
        services.worker(engine) as (worker, membership),
    ):
        groups, stop = submitted(worker), asyncio.Event()
        work = asyncio.create_task(worker.run(stop))
        await asyncio.wait_for(membership.connected.wait(), 10)
        await services.rendezvous.serve(0)
        await sglang.generated(11 * 100)
        await publish(make_sender(timeoutSeconds=30), 1, other_model)

        def evaluated() -> list[Sample]:
            return [s for g in groups if g.prompt.purpose is Purpose.EVALUATE for s in g.samples]

        async with asyncio.timeout(60):
            while len(evaluated()) < 3:
                await asyncio.sleep(0.1)
        stop.set()
        await asyncio.wait_for(work, 30)
    for sample in evaluated():
        sample.check()
        assert [span.version for span in sample.weight_versions] == [0, 1]
        assert error_of(sample, {0: model, 1: other_model}) < tolerance()
        assert error_of(sample, {0: other_model, 1: model}) > 10 * tolerance()
