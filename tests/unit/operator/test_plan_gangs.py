from datetime import timedelta
from typing import Any

import pytest

from sluice.api import GangStatus
from sluice.api.groups.lifecycle import FailurePolicy
from sluice_operator.plan.decide.deletion import deletions
from sluice_operator.plan.decide.gangs import advance, desired_gangs, retire
from sluice_operator.plan.decide.restart import Restart
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.constants import BROKEN_GRACE, ENGINE_GRACE, GRACE
from sluice_operator.plan.facts.model import Deletion, Gang
from tests.unit.operator.world import START, make_job, make_pod

GANG = Gang("trainer", 0, 2)
CREATED = GangStatus(replica=0, attempt=3)
DUE = GangStatus(replica=0, attempt=3, retry_time=clock.text(START))
LATER = GangStatus(replica=0, attempt=3, retry_time=clock.later(START, 10))
AN_HOUR_AHEAD = GangStatus(replica=0, attempt=3, retry_time=clock.later(START, 3600))


def pods(attempt: int = 3, count: int = 2, **change: object) -> list[dict[str, object]]:
    return [make_pod(attempt=attempt, index=index, **change) for index in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "present", "create", "delete", "attempt", "retry"),
    [
        pytest.param(None, [], (0, 1), 0, 1, True, id="a new gang is created whole"),
        pytest.param(DUE, [], (0, 1), 0, 3, True, id="an attempt that is due is created"),
        pytest.param(LATER, [], (), 0, 3, True, id="an attempt waits for its back-off"),
        pytest.param(AN_HOUR_AHEAD, [], (0, 1), 0, 3, True, id="the clock was set back since"),
        pytest.param(
            DUE, pods(count=1), (1,), 0, 3, True, id="a creation that was cut off is completed"
        ),
        pytest.param(DUE, pods(), (), 0, 3, False, id="all pods seen: created"),
        pytest.param(CREATED, pods(), (), 0, 3, False, id="nothing to do"),
        pytest.param(CREATED, [], (), 0, 4, True, id="all pods vanished"),
        pytest.param(CREATED, pods(count=1), (), 1, 4, True, id="a lost pod takes its gang along"),
        pytest.param(DUE, pods(attempt=2), (), 2, 3, True, id="older pods go first"),
        pytest.param(
            DUE,
            pods(attempt=2) + pods(count=1),
            (),
            2,
            3,
            True,
            id="nothing is created beside older pods",
        ),
        pytest.param(DUE, pods(attempt=5), (), 0, 5, False, id="a lost status believes its pods"),
        pytest.param(None, pods(attempt=5, count=1), (1,), 0, 5, True, id="no status, half a gang"),
    ],
)
def test_advance(status, present, create, delete, attempt, retry) -> None:  # type: ignore[no-untyped-def]
    step = advance(GANG, status, present, FailurePolicy(), START)
    assert step.create == create
    assert len(step.delete) == delete
    assert step.status.attempt == attempt
    assert (step.status.retry_time is not None) is retry


def test_a_failed_pod_takes_its_gang_to_the_next_attempt() -> None:
    gang = [make_pod(attempt=3), make_pod(attempt=3, index=1, phase="Failed", ends={"trainer": 1})]
    step = advance(GANG, CREATED, gang, FailurePolicy(), START)
    assert [deletion.name for deletion in step.delete] == [
        "demo-trainer-0-3-0",
        "demo-trainer-0-3-1",
    ]
    assert (step.status.attempt, step.status.restarts) == (4, 1)
    assert step.create == ()


@pytest.mark.parametrize(
    ("status", "present", "attempt"),
    [
        (CREATED, pods(), 4),
        (CREATED, [], 4),
        (DUE, [], 3),
        (DUE, pods(count=1), 4),
        (LATER, pods(attempt=2), 3),
    ],
    ids=[
        "pods were made",
        "created without pods",
        "due without pods",
        "due with some pods",
        "older pods",
    ],
)
def test_retire_takes_a_new_number_only_where_pods_were_made(status, present, attempt) -> None:  # type: ignore[no-untyped-def]
    assert retire(status, present, START).attempt == attempt


def test_retire_keeps_the_count_of_restarts() -> None:
    assert retire(GangStatus(replica=0, attempt=3, restarts=2), pods(), START).restarts == 2


@pytest.mark.parametrize(
    ("after", "expected"),
    [(None, [300]), (0, []), (119, []), (420, [0])],
)
def test_deletions_use_force_only_on_a_pod_that_a_dead_node_keeps(
    after: int | None, expected: list[int]
) -> None:
    pod = make_pod()
    if after is not None:  # deletionTimestamp is the request plus the grace of 120 s
        pod["metadata"]["deletionTimestamp"] = clock.text(START + timedelta(seconds=120 - after))
    assert [deletion.grace for deletion in deletions([pod], START)] == expected


@pytest.mark.parametrize(
    ("role", "grace"), [("trainer", 300), ("rollout", 60), ("buffer", 30), ("rendezvous", 10)]
)
def test_grace_of_a_role(role: str, grace: int) -> None:
    assert deletions([make_pod(role)], START) == (Deletion("Pod", f"demo-{role}-0-1-0", grace),)


def test_a_template_says_how_long_a_pod_may_take_to_end() -> None:
    pod = make_pod("trainer")
    pod["spec"]["terminationGracePeriodSeconds"] = 1800
    assert [deletion.grace for deletion in deletions([pod], START)] == [1800]


def test_zero_seconds_of_grace_are_no_deletion_by_force() -> None:
    pod = make_pod("trainer")
    pod["spec"]["terminationGracePeriodSeconds"] = 0
    assert [deletion.grace for deletion in deletions([pod], START)] == [1]


def test_what_is_left_of_a_broken_trainer_gang_is_not_waited_for() -> None:
    alive, dead = (
        make_pod("trainer"),
        make_pod("trainer", index=1, phase="Failed", ends={"trainer": 1}),
    )
    alive["spec"]["terminationGracePeriodSeconds"] = 1800
    gang, stored = Gang("trainer", 0, 2), GangStatus(replica=0, attempt=1)
    step = advance(gang, stored, [alive, dead], FailurePolicy(), START)
    assert {deletion.grace for deletion in step.delete} == {BROKEN_GRACE}


@pytest.mark.parametrize(
    ("ended", "grace"),
    [
        pytest.param("worker", ENGINE_GRACE, id="only the engine is left, which may hang"),
        pytest.param("engine", GRACE["rollout"], id="the worker gives its leases back"),
    ],
)
def test_what_is_left_of_a_broken_rollout_gang_has_time_for_what_it_can_save(
    ended: str, grace: int
) -> None:
    head, other = make_pod("rollout", ends={ended: 1}), make_pod("rollout", index=1)
    gang, stored = Gang("rollout", 0, 2), GangStatus(replica=0, attempt=1)
    step = advance(gang, stored, [head, other], FailurePolicy(), START)
    assert [deletion.grace for deletion in step.delete] == [grace, grace]


def test_a_disrupted_trainer_gang_has_its_time_for_a_checkpoint() -> None:
    alive, evicted = make_pod("trainer"), make_pod("trainer", index=1)
    alive["spec"]["terminationGracePeriodSeconds"] = 1800
    evicted["metadata"]["deletionTimestamp"] = clock.text(START)
    gang, stored = Gang("trainer", 0, 2), GangStatus(replica=0, attempt=1)
    step = advance(gang, stored, [alive, evicted], FailurePolicy(), START)
    assert [(deletion.name, deletion.grace) for deletion in step.delete] == [
        ("demo-trainer-0-1-0", 1800)
    ]


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        pytest.param({}, 1, id="the default"),
        pytest.param({"replicas": 3}, 3, id="a number"),
        pytest.param({"replicas": 0, "minReplicas": 2}, 0, id="none"),
        pytest.param({"minReplicas": 2}, 2, id="the least, by default"),
        pytest.param({"replicas": 1, "minReplicas": 2}, 2, id="an autoscaler below the least"),
        pytest.param({"replicas": 5, "minReplicas": 2}, 5, id="above the least"),
    ],
)
def test_engines_of_a_job(rollout: dict[str, Any], expected: int) -> None:
    job = make_job(rollout=rollout)
    assert job.spec.replicas == expected
    assert (
        len([desired_gang for desired_gang in desired_gangs(job) if desired_gang.role == "rollout"])
        == expected
    )


def test_sft_has_engines_only_if_there_is_something_to_evaluate() -> None:
    """Whatever the number says: an API server writes its default out."""
    sft = {"algorithm": {"loss": {"type": "sft"}}, "rollout": {"replicas": 2}}
    assert make_job(**sft).spec.replicas == 0
    evaluation = {"datasets": [{"path": "/data/held-out.jsonl"}]}
    assert make_job(**sft, evaluation=evaluation).spec.replicas == 2


def test_gangs_of_a_job() -> None:
    job = make_job(trainer={"nodes": 4}, rollout={"replicas": 2, "nodesPerReplica": 3})
    assert desired_gangs(job) == [
        Gang("rendezvous", 0, 1),
        Gang("buffer", 0, 1),
        Gang("rollout", 0, 3),
        Gang("rollout", 1, 3),
        Gang("trainer", 0, 4),
    ]


def test_an_engine_that_failed_before_is_known_to_work_again() -> None:
    gang, stored = Gang("rollout", 0, 1), GangStatus(replica=0, attempt=2, restarts=1)
    ready = make_pod("rollout", attempt=2)
    status = advance(gang, stored, [ready], FailurePolicy(), START).status
    assert status.ready_time == clock.text(START)
    later = START + timedelta(seconds=30)
    assert advance(gang, status, [ready], FailurePolicy(), later).status == status
    failed = make_pod("rollout", attempt=2, ends={"worker": 1})
    step = advance(gang, status, [failed], FailurePolicy(), later)
    assert isinstance(step.decision, Restart)
    assert (step.decision.delay, step.status.restarts, step.status.ready_time) == (10, 1, None)
    first = GangStatus(replica=0, attempt=1)
    assert (
        advance(gang, first, [make_pod("rollout")], FailurePolicy(), START).status.ready_time
        is None
    )
