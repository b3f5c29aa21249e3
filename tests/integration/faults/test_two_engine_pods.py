"""An engine of two pods, tensor parallel over both: each is killed once. It comes back, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.integration.run.laptop import Laptop, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, BATCH = 30, 8


def scheduler(run: Laptop, pod: int) -> int:
    """Pid of the scheduler in one of the engine's pods."""
    assert run.process is not None
    host = psutil.Process(run.process.pid)

    def look() -> int | None:
        for process in host.children(recursive=True):
            try:
                if f"--node-rank {pod}" in " ".join(process.cmdline()):
                    names = {" ".join(child.cmdline()): child.pid for child in process.children(recursive=True)}
                    return next((int(names[name]) for name in names if name.startswith("sglang::scheduler")), None)
            except psutil.Error:
                continue
        return None

    return int(run.until(look, f"scheduler of pod {pod}", 120))


def test_a_pod_of_an_engine_that_dies_takes_the_engine_along_and_nothing_is_lost(laptop: Callable[..., Laptop]) -> None:
    run = laptop(
        "rollout.nodesPerReplica=2", "rollout.replicas=1", f"trainer.steps={STEPS}", f"rollout.batchSize={BATCH}",
        "evaluation=null",
    )  # fmt: skip
    run.start()
    run.until_step(2)
    os.kill(scheduler(run, 1), signal.SIGKILL)
    run.until_step(5)
    os.kill(scheduler(run, 0), signal.SIGKILL)
    assert run.wait(600) == 0, run.text()[-3000:]
    summary = run.summary()
    assert (summary["state"], summary["steps"], summary["groups_trained"]) == ("Succeeded", STEPS, STEPS * BATCH)
    assert summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    pods = {path.name.partition(".")[0] for path in (run.directory / "logs").glob("*.engine.log")}
    assert {name.rpartition("rollout-0-")[2] for name in pods} >= {f"{a}-{i}" for a in (1, 2, 3) for i in (0, 1)}
    assert processes_of(run.directory) == []
