from datetime import datetime, timedelta

import pytest

from sluice.api import RLJobStatus
from sluice_operator.plan.decide.deadlines import hang, job_deadline, progress_due, upcoming
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.model import GangFacts
from tests.unit.operator.world import START, make_job


@pytest.mark.parametrize(
    ("spec", "step", "after", "reason"),
    [
        ({}, None, 14399, None),
        ({}, None, 14400, "StartupDeadlineExceeded"),
        ({}, 1, 10**9, None),
        ({"startupDeadlineSeconds": 0}, None, 10**9, None),
        ({"activeDeadlineSeconds": 60}, 5, 59, None),
        ({"activeDeadlineSeconds": 60}, 5, 60, "DeadlineExceeded"),
        ({"startupDeadlineSeconds": 60}, None, 59, None),
        ({"startupDeadlineSeconds": 60}, None, 60, "StartupDeadlineExceeded"),
        ({"startupDeadlineSeconds": 60}, 0, 60, "StartupDeadlineExceeded"),
        ({"startupDeadlineSeconds": 60}, 1, 60, None),
        ({"startupDeadlineSeconds": 60, "activeDeadlineSeconds": 60}, None, 60, "DeadlineExceeded"),
    ],
)
def test_job_deadline(
    spec: dict[str, int], step: int | None, after: int, reason: str | None
) -> None:
    progress = clock.text(START) if step else None
    status = RLJobStatus(start_time=clock.text(START), step=step, last_progress_time=progress)
    expired = job_deadline(
        make_job(**spec).spec, status, START + timedelta(seconds=after), "pods are pending"
    )
    assert (expired[0] if expired else None) == reason


def test_a_job_that_has_not_started_meets_no_deadline() -> None:
    assert job_deadline(make_job(activeDeadlineSeconds=1).spec, RLJobStatus(), START) is None


RUNNING = GangFacts(seen=2, running=2, started=START + timedelta(seconds=100))


@pytest.mark.parametrize(
    ("deadline", "facts", "last_progress", "expected"),
    [
        (None, RUNNING, None, None),
        (60, GangFacts(seen=2, running=1, started=START), None, None),
        (60, RUNNING, None, 160),
        (60, RUNNING, 50, 160),
        (60, RUNNING, 500, 560),
    ],
)
def test_progress_due(
    deadline: int | None, facts: GangFacts, last_progress: int | None, expected: int | None
) -> None:
    seen = (
        clock.text(START + timedelta(seconds=last_progress)) if last_progress is not None else None
    )
    status = RLJobStatus(start_time=clock.text(START), last_progress_time=seen)
    job = make_job(progressDeadlineSeconds=deadline, trainer={"nodes": 2})
    due = progress_due(job.spec, status, facts, 2)
    assert due == (START + timedelta(seconds=expected) if expected is not None else None)


@pytest.mark.parametrize(
    ("due", "hangs"), [(None, False), (START, True), (START + timedelta(seconds=1), False)]
)
def test_hang(due: datetime | None, hangs: bool) -> None:
    failure = hang(
        due, RLJobStatus(step=7), make_job(progressDeadlineSeconds=60).spec, "pod", START
    )
    assert (failure is not None) is hangs
    if failure:
        assert failure.reason == "ProgressDeadlineExceeded"
        assert failure.message == "no step for 60 s (progressDeadlineSeconds); the last was 7"


def test_upcoming_names_the_moments_at_which_the_plan_may_change() -> None:
    spec = make_job(activeDeadlineSeconds=60, startupDeadlineSeconds=30).spec
    status = RLJobStatus(start_time=clock.text(START))
    assert [(moment - START).seconds for moment in upcoming(spec, status, None)] == [60, 30]
    trained = status.model_copy(update={"last_progress_time": clock.text(START)})
    assert [(moment - START).seconds for moment in upcoming(spec, trained, None)] == [60]
