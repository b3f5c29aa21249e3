"""The first time that a job counts as running: the end of time-to-running."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.api import Condition, RLJobStatus
from sluice_operator.plan.facts import clock
from sluice_operator.spec_acceptance import is_first_run
from tests.unit.operator.world import START

NOW = clock.text(START)


def status(running: str, **more: Any) -> RLJobStatus:
    condition = Condition(type="Running", status=running, reason="Any", last_transition_time=NOW)
    return RLJobStatus(conditions=[condition], **more)


@pytest.mark.parametrize(
    ("before", "now", "first"),
    [
        (None, status("True"), True),
        (status("False"), status("True"), True),
        (status("False"), status("False"), False),
        (status("True"), status("True"), False),
        (status("False", last_progress_time=NOW), status("True"), False),
    ],
    ids=["at once", "after a wait", "not yet", "still", "after a restart or a resume"],
)
def test_a_job_runs_for_the_first_time(
    before: RLJobStatus | None, now: RLJobStatus, first: bool
) -> None:
    assert is_first_run(before, now) is first
