"""A frozen engine of two in a real run: the other one and the trainer go on."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from sluice.api import WeightSync
from tests.integration.run.laptop import Laptop, processes_of, send_signal

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STEPS, BATCH = 40, 8
# Seconds: well below the time after which the worker ends its engine, and below a phase's deadline.
SOON = 10 * WeightSync().late_seconds


def test_an_engine_that_freezes_holds_up_no_update(laptop: Callable[..., Laptop]) -> None:
    run = laptop(
        "rollout.replicas=2",
        "rollout.mode=async",
        "rollout.maxStaleness=2",
        "weightSync.pauseMode=in_place",
        f"trainer.steps={STEPS}",
        f"rollout.batchSize={BATCH}",
        "evaluation=null",
    )
    run.start()
    run.until_step(4)
    frozen = run.engine("rollout-1")
    send_signal(frozen, signal.SIGSTOP)
    print("frozen at step", run.step())
    assert run.wait(600) == 0, run.text()[-3000:]
    steps = run.steps()
    paused = {n: step["perf/update_weights/paused_time"] for n, step in steps.items()}
    print({n: round(seconds, 2) for n, seconds in paused.items()})
    print({n: round(step["perf/step_time"], 2) for n, step in steps.items()})
    assert max(paused.values()) < SOON
    summary = run.summary()
    assert (summary["state"], summary["steps"]) == ("Succeeded", STEPS)
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
    assert processes_of(run.directory) == []
