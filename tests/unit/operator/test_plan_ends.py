"""Success, draining and time to live: how a job ends."""

from datetime import timedelta

import pytest

from sluice.api import LastFailure, RLJobStatus
from sluice_operator.plan.decide.deadlines import expiry
from sluice_operator.plan.decide.deletion import drain, to_drain
from sluice_operator.plan.decide.gangs import has_succeeded
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.model import Gang, GangFacts
from tests.unit.operator.world import START, make_job, make_pod

CRASH = LastFailure(role="trainer", pod="p", time=clock.text(START))


@pytest.mark.parametrize(
    ("gang", "facts", "expected"),
    [
        (Gang("trainer", 0, 2), GangFacts(succeeded=2), True),
        (Gang("trainer", 0, 2), GangFacts(succeeded=1), False),
        (Gang("trainer", 0, 2), GangFacts(succeeded=2, failure=CRASH), False),
        (Gang("buffer", 0, 1), GangFacts(succeeded=1), False),
    ],
    ids=["all of the trainer", "half of the trainer", "one crashed", "a buffer"],
)
def test_has_succeeded(gang: Gang, facts: GangFacts, expected: bool) -> None:
    assert has_succeeded(gang, facts) is expected


@pytest.mark.parametrize(
    ("roles", "stopped"),
    [
        (["rendezvous", "buffer", "rollout", "trainer"], ["rollout", "trainer"]),
        (["rendezvous", "buffer", "rollout"], ["rollout"]),
        (["rendezvous", "buffer"], ["buffer"]),
        (["rendezvous"], ["rendezvous"]),
        ([], []),
    ],
    ids=str,
)
def test_workers_stop_before_what_they_report_to(roles: list[str], stopped: list[str]) -> None:
    decision = drain([make_pod(role) for role in roles], START)
    assert [deletion.name for deletion in decision] == [f"demo-{role}-0-1-0" for role in stopped]


def test_later_stages_wait_for_terminating_pods() -> None:
    rollout = make_pod("rollout")
    rollout["metadata"]["deletionTimestamp"] = clock.text(START)
    assert drain([rollout, make_pod("buffer")], START) == ()


def test_later_stages_do_not_wait_for_ended_pods() -> None:
    """A kubelet takes up to a minute until it takes the object of an ended pod away."""
    rollout = make_pod("rollout", phase="Failed")
    rollout["metadata"]["deletionTimestamp"] = clock.text(START)
    decision = drain(
        [
            rollout,
            make_pod("trainer", phase="Succeeded"),
            make_pod("buffer"),
            make_pod("rendezvous"),
        ],
        START,
    )
    assert [deletion.name for deletion in decision] == ["demo-trainer-0-1-0", "demo-buffer-0-1-0"]


def test_ended_pods_stay_for_their_logs() -> None:
    done, running = make_pod("trainer", phase="Succeeded"), make_pod("buffer")
    assert to_drain([done, running]) == [running]


@pytest.mark.parametrize(
    ("ttl", "completed", "expected"),
    [(None, True, None), (60, False, None), (60, True, 60), (0, True, 0)],
)
def test_expiry(ttl: int | None, completed: bool, expected: int | None) -> None:
    status = RLJobStatus(completion_time=clock.text(START) if completed else None)
    moment = expiry(make_job(ttlSecondsAfterFinished=ttl).spec, status)
    assert moment == (START + timedelta(seconds=expected) if expected is not None else None)
