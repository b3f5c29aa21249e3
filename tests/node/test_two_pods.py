"""A trainer of two pods, and an engine of two pods, on a real node: one pod of each is killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.node.checks import START_SECONDS, check_sound
from tests.node.jobs import NAME, Quickstart

pytestmark = pytest.mark.timeout(2400)
STEPS = 40


def test_a_rank_of_a_trainer_of_two_pods_is_killed(
    quickstart: Quickstart, record: Callable[..., None]
) -> None:
    quickstart.start(trainer={"steps": STEPS, "nodes": 2}, checkpoint={"everySteps": 5})
    quickstart.until_step(8, START_SECONDS)
    quickstart.kill("trainer", "sluice_trainer", index=1)
    quickstart.until_state("Succeeded", 2 * START_SECONDS)
    check_sound(quickstart, STEPS)
    status = quickstart.status()
    assert status["restarts"] == 1
    assert status["lastFailure"]["pod"] == "quickstart-trainer-0-1-1", (
        "the cause, not the rank that missed it"
    )
    assert "SIGKILL" in quickstart.kubectl("describe", "rljob", NAME).partition("\nEvents:")[2]
    record(quickstart)


def test_a_pod_of_an_engine_of_two_pods_is_killed(
    quickstart: Quickstart, record: Callable[..., None]
) -> None:
    quickstart.start(
        trainer={"steps": STEPS},
        rollout={"nodesPerReplica": 2},
        failurePolicy={"rolloutBackoffSeconds": 1},
    )
    for index in (1, 0):
        reached = quickstart.step()
        quickstart.until_step(reached + 5, START_SECONDS)
        quickstart.kill("rollout", "/sluice/sglang/launch_server.py", index=index)
    quickstart.until_state("Succeeded", 2 * START_SECONDS)
    check_sound(quickstart, STEPS)
    record(quickstart)
