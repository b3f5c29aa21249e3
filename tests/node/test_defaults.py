"""A job without settings of checkpoints: the operator's claim holds them, and a kill of every role
loses no group."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.node.checks import START_SECONDS, check_sound
from tests.node.jobs import NAME, Quickstart

pytestmark = pytest.mark.timeout(2400)
# Process to kill -> a word of its command line. The rollout's pod has a worker and an engine.
PROGRAMS = {
    "buffer": "sluice_buffer",
    "rendezvous": "sluice_rendezvous",
    "trainer": "sluice_trainer",
    "rollout": "sluice_rollout",
    "engine": "/sluice/sglang/launch_server.py",
}


def test_a_kill_of_every_role_loses_nothing(
    quickstart: Quickstart, record: Callable[..., None]
) -> None:
    """Each process once, the trainer before its first checkpoint and after it, and its whole pod in
    the end."""
    steps = 120
    quickstart.start(trainer={"steps": steps}, checkpoint=None, failurePolicy=None)
    quickstart.until_step(4, START_SECONDS)
    quickstart.kill("trainer", PROGRAMS["trainer"])
    quickstart.until_step(25, START_SECONDS)
    for what in ("buffer", "rendezvous", "rollout", "engine", "trainer"):
        reached = quickstart.step()
        quickstart.kill("rollout" if what == "engine" else what, PROGRAMS[what])
        quickstart.until_step(reached + 12, START_SECONDS)
    quickstart.replace("trainer", "--grace-period=0", "--force")
    quickstart.until_state("Succeeded", START_SECONDS)
    check_sound(quickstart, steps)
    claim = quickstart.status()["checkpointClaim"]
    record(quickstart)
    quickstart.kubectl("delete", "rljob", NAME, "--timeout=60s", seconds=90)
    kept = quickstart.node.get("-n", quickstart.namespace, "pvc", claim)
    assert kept["status"]["phase"] == "Bound", "the model outlives its job"
