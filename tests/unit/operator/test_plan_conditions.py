from datetime import timedelta
from typing import get_args

import pytest

from sluice.api import Condition, GangStatus, RLJobStatus
from sluice.api.status import RoleName
from sluice_operator.plan import KubeObject, Observed, Progress
from sluice_operator.plan.decide.gangs import GangPlan
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import Gang, GangFacts
from sluice_operator.plan.report.conditions import (
    ConditionUpdate,
    running,
    state_word,
    summary,
    updated,
    weights_in_sync,
)
from tests.unit.operator.world import START, job_pass, make_job, make_pod

UP, DOWN = GangFacts(ready=1), GangFacts()
FRESH = GangStatus(replica=0, attempt=1)
RESTARTED = GangStatus(replica=0, attempt=2, last_restart_time=clock.text(START))
STARTED = RLJobStatus(start_time=clock.text(START))
RUNNING = STARTED.model_copy(
    update={
        "conditions": [
            Condition(
                type="Running",
                status="True",
                reason="Running",
                message="",
                last_transition_time=clock.text(START),
            )
        ]
    }
)
TRAINED = RLJobStatus(start_time=clock.text(START), step=0, last_progress_time=clock.text(START))


def pass_of(
    status: RLJobStatus, progress: Progress | None, *pods: KubeObject, gpus: int = 0
) -> JobPass:
    observed = Observed(pods, status=status, progress=progress)
    job = make_job(rollout={"gpusPerReplica": gpus}, trainer={"gpusPerNode": gpus})
    return job_pass(job, observed)


def steps(**facts: GangFacts) -> list[GangPlan]:
    roles: dict[RoleName, GangFacts] = {role: facts.get(role, UP) for role in get_args(RoleName)}
    return [
        GangPlan(Gang(role, 0, 1), RESTARTED if observed is DOWN and facts else FRESH, observed)
        for role, observed in roles.items()
    ]


@pytest.mark.parametrize(
    ("status", "gang_steps", "progress", "expected"),
    [
        (STARTED, steps(), None, ("False", "BufferUnreachable")),
        (STARTED, steps(), Progress(0), ("False", "Starting")),
        (STARTED, steps(), Progress(0, engines=1, engines_in_sync=1), ("True", "Running")),
        (RUNNING, steps(), Progress(0, engines=1), ("True", "Running")),
        (TRAINED, steps(), None, ("True", "Running")),
        (TRAINED, steps(trainer=DOWN), Progress(1), ("False", "Restarting")),
        (STARTED, [GangPlan(Gang("trainer", 0, 1), FRESH)], Progress(1), ("False", "PodsPending")),
        (
            TRAINED,
            [*steps(), GangPlan(Gang("rollout", 1, 1), RESTARTED)],
            None,
            ("True", "Running"),
        ),
        (STARTED, steps(rollout=DOWN), Progress(1), ("False", "Restarting")),
    ],
    ids=[
        "buffer does not answer",
        "starts",
        "first engine in sync",
        "engines take the weights of the first step",
        "trained before",
        "trainer down",
        "gangs missing",
        "one engine restarted",
        "rollout down",
    ],
)
def test_running(status, gang_steps, progress, expected) -> None:  # type: ignore[no-untyped-def]
    finding = running(pass_of(status, progress), gang_steps)
    assert (finding.status, finding.reason) == expected


@pytest.mark.parametrize(
    ("progress", "may_compile", "waits"),
    [
        (None, True, "no engine is ready yet"),
        (Progress(0), False, "no engine has started yet"),
        (
            Progress(0),
            True,
            "no engine has started yet; the first start compiles kernels, which takes minutes "
            "(kernelCache keeps them)",
        ),
        (Progress(0, engines=1), True, "no engine holds the weights yet"),
        (
            Progress(0, engines=1, dropped="rollout-0: transfer: /update answered 400: no vision"),
            True,
            "no engine holds the weights yet; rollout-0: transfer: /update answered 400: no vision",
        ),
    ],
)
def test_a_job_that_starts_says_what_it_waits_for(
    progress: Progress | None, may_compile: bool, waits: str
) -> None:
    others = [step for step in steps() if step.gang.role != "rollout"]
    engine = GangPlan(Gang("rollout", 0, 1), FRESH, GangFacts(running=1))
    finding = running(pass_of(STARTED, progress, gpus=int(may_compile)), [*others, engine])
    assert finding.message == f"pods are running; {waits}"


def test_a_job_without_engines_waits_for_none() -> None:
    job = make_job(algorithm={"loss": {"type": "sft"}}, reward=None)
    others = [step for step in steps() if step.gang.role != "rollout"]
    finding = running(job_pass(job, Observed((), status=STARTED, progress=Progress(0))), others)
    assert (finding.status, finding.reason) == ("True", "Running")


def test_running_says_why_a_pod_waits() -> None:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "no GPUs",
    }
    pod = make_pod(phase="Pending", conditions=[condition])
    finding = running(pass_of(STARTED, None, pod), [GangPlan(Gang("trainer", 0, 1), FRESH)])
    assert finding.message == "0 of 1 pods are running; demo-trainer-0-1-0: Unschedulable: no GPUs"


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (None, ("Unknown", "Unknown")),
        (Progress(1), ("False", "NoEngines")),
        (Progress(1, engines=2, engines_in_sync=1), ("False", "EnginesBehind")),
        (Progress(1, engines=2, engines_in_sync=2), ("True", "InSync")),
    ],
    ids=["unknown", "no engines", "one behind", "in sync"],
)
def test_weights_in_sync(progress: Progress | None, expected: tuple[str, str]) -> None:
    finding = weights_in_sync(progress)
    assert (finding.status, finding.reason) == expected


def test_an_engine_that_is_behind_says_why() -> None:
    progress = Progress(3, engines=2, engines_in_sync=1, dropped="rollout-1: pause: it is late")
    assert weights_in_sync(progress).message == (
        "not every engine holds the newest weights yet; rollout-1: pause: it is late"
    )


def test_transition_time_moves_only_with_the_status() -> None:
    first = updated(RLJobStatus(), [ConditionUpdate("Running", "False", "A", "a")], 1, START)
    later = START + timedelta(seconds=9)
    same = updated(
        RLJobStatus(conditions=first), [ConditionUpdate("Running", "False", "B", "b")], 2, later
    )
    assert same[0].last_transition_time == clock.text(START)
    assert (same[0].reason, same[0].observed_generation) == ("B", 2)
    other = updated(
        RLJobStatus(conditions=same), [ConditionUpdate("Running", "True", "C", "c")], 2, later
    )
    assert other[0].last_transition_time == clock.text(later)


@pytest.mark.parametrize(
    ("stated", "word"),
    [
        ([], "Pending"),
        ([("Running", "False", "PodsPending")], "Pending"),
        ([("Running", "False", "BufferUnreachable")], "Starting"),
        ([("Running", "False", "Starting")], "Starting"),
        ([("Running", "False", "Restarting")], "Restarting"),
        ([("Running", "True", "Running")], "Running"),
        ([("Running", "True", "Running"), ("Suspended", "False", "Resumed")], "Running"),
        ([("Running", "False", "Stopped"), ("Suspended", "True", "Suspended")], "Suspended"),
        ([("Suspended", "True", "Suspended"), ("Failed", "True", "X")], "Failed"),
        ([("Running", "False", "Stopped"), ("Succeeded", "True", "X")], "Succeeded"),
    ],
    ids=str,
)
def test_state_word(stated: list[tuple[str, str, str]], word: str) -> None:
    conditions = [
        Condition(type=kind, status=status, reason=reason, last_transition_time=clock.text(START))
        for kind, status, reason in stated
    ]
    assert state_word(conditions) == word
    assert summary(conditions)["state"] == word


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ([], ""),
        (
            [
                ("Admitted", "True", "Admitted"),
                ("Running", "False", "PodsPending"),
                ("WeightsInSync", "Unknown", "Unknown"),
            ],
            "PodsPending",
        ),
        ([("Running", "True", "Running"), ("WeightsInSync", "False", "EnginesBehind")], "Running"),
        ([("Running", "True", "Running"), ("Suspended", "False", "Resumed")], "Running"),
        ([("Running", "False", "Stopped"), ("Suspended", "True", "Suspended")], "Suspended"),
        (
            [("Running", "False", "Stopped"), ("Failed", "True", "ReachedMaxRestarts")],
            "ReachedMaxRestarts",
        ),
    ],
    ids=["nothing", "waits", "trains", "resumed", "suspended", "failed"],
)
def test_the_reason_is_that_of_the_state(stated: list[tuple[str, str, str]], reason: str) -> None:
    conditions = [
        Condition(type=t, status=s, reason=r, last_transition_time="") for t, s, r in stated
    ]
    assert summary(conditions)["reason"] == reason
