"""SIGSTOP of each role for longer than its peers wait, and SIGCONT.

No group is lost or trained twice.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.integration.run.laptop import PROGRAMS, Laptop, processes_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LEASE = 4
# Seconds: longer than a lease, and than the five heartbeats of silence after which the rendezvous
# drops a member.
FROZEN = 15.0
STEPS_BETWEEN, BATCH = 2, 16


def test_each_role_may_freeze_and_come_back(laptop: Callable[..., Laptop]) -> None:
    total = STEPS_BETWEEN * (len(PROGRAMS) + 1) + 2
    run = laptop(
        f"trainer.steps={total}", f"rollout.batchSize={BATCH}", f"buffer.leaseSeconds={LEASE}",
        "evaluation.everySteps=100",
    )  # fmt: skip
    run.start()
    for number, role in enumerate(PROGRAMS):
        run.until_step(2 + STEPS_BETWEEN * number)
        pid = run.kill(role, signal.SIGSTOP)
        print("stop", role, "at step", run.step())
        time.sleep(FROZEN)
        if psutil.pid_exists(pid):  # else it was replaced meanwhile, which is as good
            os.kill(pid, signal.SIGCONT)
    assert run.wait(300) == 0, run.text()[-3000:]
    summary = run.summary()
    assert (summary["state"], summary["steps"], summary["groups_trained"]) == (
        "Succeeded",
        total,
        total * BATCH,
    )
    assert (
        summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    )
    assert summary["logprob_diff_max"] <= 1e-4
    assert processes_of(run.directory) == []
