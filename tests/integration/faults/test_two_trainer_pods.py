"""A trainer of two pods: a rank is killed, later one hangs.

Each time the gang restarts, and no group is lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.integration.run.laptop import Laptop, processes_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
# Seconds without a step that count as a hang. The start of an attempt must fit in.
PATIENCE = 90
STEPS, BATCH = 14, 8


def rank_process(run: Laptop, rank: int) -> int:
    """Pid of a rank of the trainer, below its pod's torchrun."""

    def is_it(process: psutil.Process) -> bool:
        return "sluice_trainer" in process.cmdline() and process.environ().get("RANK") == str(rank)

    return run.until_process(is_it, f"process of rank {rank}", 60)


def test_a_rank_that_dies_or_hangs_restarts_the_gang(laptop: Callable[..., Laptop]) -> None:
    run = laptop(
        "trainer.nodes=2",
        f"trainer.steps={STEPS}",
        f"rollout.batchSize={BATCH}",
        "checkpoint.everySteps=3",
        f"progressDeadlineSeconds={PATIENCE}",
        "failurePolicy.maxRestarts=10",
        "evaluation.everySteps=100",
    )
    run.start()
    run.until_step(4)
    os.kill(rank_process(run, 1), signal.SIGKILL)
    run.until_step(7)
    os.kill(rank_process(run, 1), signal.SIGSTOP)
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
    assert summary["restarts"] >= 2
    assert "====" not in run.text(), "the frame of torch's traceback is no reason for people"
    assert f"no step for {PATIENCE} s" in run.text()
    for step, records in run.replayed().items():
        seen = {(r["train/loss"], r["rollout/raw_reward"]) for r in records}
        assert len(seen) == 1, f"step {step} was replayed differently: {records}"
    assert processes_of(run.directory) == []
