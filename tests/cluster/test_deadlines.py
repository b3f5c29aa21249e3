"""The three deadlines of a job, and what the job's real buffer and rendezvous tell the operator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import StartOperator
from tests.cluster.control_plane import ControlPlane
from tests.cluster.dataplane import DataPlane, prompts
from tests.cluster.operators import Operator
from tests.cluster.world import World

StartJob = Callable[..., Awaitable[DataPlane]]


@pytest.fixture
async def running(plane: ControlPlane, world: World, tmp_path: Path) -> AsyncIterator[StartJob]:
    """Starts a job whose pods run, with its buffer and its rendezvous."""
    if plane.directory is None:
        pytest.skip("cluster IPs of KUBECONFIG's control plane are not addresses of this machine")
    started: list[DataPlane] = []

    async def start_one(**spec: Any) -> DataPlane:
        job = await world.create(data={"prompts": [{"path": str(prompts(tmp_path))}]}, **spec)
        await world.until_pods(5)
        started.append(DataPlane(world, job, tmp_path))
        await started[-1].start()
        await world.run()
        return started[-1]

    yield start_one
    for item in started:
        item.stop()
        print(*(log.read_text() for log in tmp_path.glob("*.log")))


async def test_a_job_that_runs_too_long_fails_and_its_pods_go(
    operator: Operator, world: World
) -> None:
    await world.running(5, activeDeadlineSeconds=3)
    await world.bind("demo-rollout-0-1-0")
    await world.until_state("Failed")
    failed = await world.condition("Failed")
    assert (failed["reason"], failed["message"]) == (
        "DeadlineExceeded",
        "the job ran for 3 s (activeDeadlineSeconds)",
    )
    await world.gone("demo-rollout-0-1-0")
    await world.until_pods(0)
    assert (await world.status())["completionTime"]


async def test_the_clock_of_the_deadline_starts_again_on_resume(
    operator: Operator, world: World
) -> None:
    await world.running(5, activeDeadlineSeconds=3600)
    first = (await world.status())["startTime"]
    await world.change({"suspend": True})
    await world.until_state("Suspended")
    assert "startTime" not in await world.status()
    await asyncio.sleep(1.1)  # times in a status are whole seconds
    await world.change({"suspend": False})
    await world.until_pods(5)
    assert (await world.status())["startTime"] > first


async def test_a_job_whose_engine_holds_the_weights_runs(
    start: StartOperator, running: StartJob, world: World
) -> None:
    operator = await start(SLUICE_PROBE_SECONDS="0.5")
    job = await running(startupDeadlineSeconds=600)
    await world.until(lambda: says(world, "Running", "Starting"), 40)
    assert (await world.condition("WeightsInSync"))["reason"] == "NoEngines"
    async with job.engine():
        await world.until_state("Running", seconds=40)
        assert (await world.condition("WeightsInSync"))["status"] == "True"
        assert operator.metric("rljob_time_to_running_seconds_count") == 1
        assert (await job.stats()).step == 0
    await world.until(lambda: says(world, "WeightsInSync", "NoEngines"), 40)


async def test_a_running_job_without_a_step_fails_at_its_start_up_deadline(
    start: StartOperator, running: StartJob, world: World
) -> None:
    """Running pods do not count as a start, only the first step does.

    The job fails because of the engine that never comes.
    """
    await start(SLUICE_PROBE_SECONDS="0.5")
    await running(startupDeadlineSeconds=8)
    await world.until_state("Failed", seconds=40)
    failed = await world.condition("Failed")
    assert failed["reason"] == "StartupDeadlineExceeded"


async def test_a_trainer_that_makes_no_step_is_restarted_as_a_failure(
    start: StartOperator, running: StartJob, world: World
) -> None:
    """The buffer answers, and its step does not move: that is a hang."""
    await start(SLUICE_PROBE_SECONDS="0.5")
    await running(progressDeadlineSeconds=5, failurePolicy={"maxRestarts": 1})
    await world.until(lambda: trainer_is(world, "demo-trainer-0-2-0"), 40)
    status = await world.status()
    assert (status["lastFailure"]["reason"], status["lastFailure"]["role"]) == (
        "ProgressDeadlineExceeded",
        "trainer",
    )
    assert status["restarts"] == 1
    await world.until(lambda: is_reported(world, "ProgressDeadlineExceeded"))
    await world.run()
    await world.until_state("Failed", seconds=40)
    assert (await world.condition("Failed"))["reason"] == "ReachedMaxRestarts"


async def test_a_buffer_that_is_silent_is_no_hang(
    start: StartOperator, running: StartJob, world: World
) -> None:
    await start(SLUICE_PROBE_SECONDS="0.5")
    job = await running(progressDeadlineSeconds=4)
    job.stop()
    await world.until(lambda: says(world, "WeightsInSync", "Unknown"), 40)
    await asyncio.sleep(8)
    assert await world.names("trainer") == ["demo-trainer-0-1-0"]
    assert (await world.status())["restarts"] == 0


async def says(world: World, kind: str, reason: str) -> bool:
    return bool((await world.condition(kind)).get("reason") == reason)


async def is_reported(world: World, reason: str) -> bool:
    return reason in await world.reasons()


async def trainer_is(world: World, *names: str) -> bool:
    return await world.names("trainer") == list(names)
