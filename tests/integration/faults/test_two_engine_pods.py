"""Each pod of an engine, tensor parallel over two, is killed once, and the run recovers.

No group is lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.integration.run.laptop import Laptop, processes_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STEPS, BATCH = 30, 8


def scheduler(run: Laptop, pod: int) -> int:
    """Pid of the scheduler in one of the engine's pods."""

    def is_it(process: psutil.Process) -> bool:
        """True if the process is a scheduler of this pod.

        Its title overwrites its command line and environment, but its parent, the server, has them.
        """
        above = [" ".join(parent.cmdline()) for parent in process.parents()]
        is_scheduler = "".join(process.cmdline()).startswith("sglang::scheduler")
        return is_scheduler and any(f"--node-rank {pod}" in line for line in above)

    return run.until_process(is_it, f"scheduler of pod {pod}", 120)


def test_a_pod_of_an_engine_that_dies_takes_the_engine_along_and_nothing_is_lost(
    laptop: Callable[..., Laptop],
) -> None:
    run = laptop(
        "rollout.nodesPerReplica=2",
        "rollout.replicas=1",
        f"trainer.steps={STEPS}",
        f"rollout.batchSize={BATCH}",
        "evaluation=null",
    )
    run.start()
    run.until_step(2)
    os.kill(scheduler(run, 1), signal.SIGKILL)
    run.until_step(5)
    os.kill(scheduler(run, 0), signal.SIGKILL)
    assert run.wait(600) == 0, run.text()[-3000:]
    summary = run.summary()
    assert (summary["state"], summary["steps"], summary["groups_trained"]) == (
        "Succeeded",
        STEPS,
        STEPS * BATCH,
    )
    assert (
        summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    )
    pods = {path.name.partition(".")[0] for path in (run.directory / "logs").glob("*.engine.log")}
    assert {name.rpartition("rollout-0-")[2] for name in pods} >= {
        f"{a}-{i}" for a in (1, 2, 3) for i in (0, 1)
    }
    assert processes_of(run.directory) == []
