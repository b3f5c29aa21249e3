"""The machine's clock jumps by an hour, forward and back, in the middle of a run.

Every role keeps its deadlines.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.run.laptop import Laptop, processes_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
HOUR = 3600
STEPS, BATCH = 14, 16


def test_a_run_does_not_notice_that_the_clock_jumps(
    laptop: Callable[..., Laptop], calendar: Path
) -> None:
    """All deadlines are shorter than the jump.

    The run has TLS, because its certificates are judged by the clock too.
    """
    run = laptop(
        f"trainer.steps={STEPS}",
        f"rollout.batchSize={BATCH}",
        "buffer.leaseSeconds=30",
        "tls.enabled=true",
        "progressDeadlineSeconds=900",
        "activeDeadlineSeconds=1800",
        "startupDeadlineSeconds=900",
        "evaluation.everySteps=3",
    )
    run.start()
    for step, offset in ((2, HOUR), (5, 0), (8, -HOUR), (11, 0)):
        run.until_step(step)
        calendar.write_text(str(offset))
    assert run.wait(300) == 0, run.text()[-3000:]
    summary = run.summary()
    assert (summary["state"], summary["steps"], summary["groups_trained"]) == (
        "Succeeded",
        STEPS,
        STEPS * BATCH,
    )
    assert (
        summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    )
    assert summary["restarts"] == 0, run.text()
    assert 0 < summary["wall_seconds"] < HOUR
    times = [
        json.loads(line)["time"]
        for line in (run.directory / "timeline.jsonl").read_text().splitlines()
    ]
    assert all(earlier < later for earlier, later in itertools.pairwise(times))
    assert processes_of(run.directory) == []


def test_a_run_that_is_taken_up_an_hour_earlier_goes_on(
    laptop: Callable[..., Laptop], calendar: Path
) -> None:
    """The clock is set back while `sluice run` is away, so its times are in the future."""
    run = laptop(
        f"trainer.steps={STEPS}", f"rollout.batchSize={BATCH}", "evaluation.everySteps=100"
    )
    run.start()
    run.until_step(3)
    run.kill("trainer")
    run.until(lambda: "Restarting" in run.text(), "restart", 60)
    run.kill("run")
    calendar.write_text(str(-HOUR))
    run.start()
    assert run.wait(300) == 0, run.text()[-3000:]
    summary = run.summary()
    assert (summary["state"], summary["groups_trained"]) == ("Succeeded", STEPS * BATCH)
    assert (
        summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    )
