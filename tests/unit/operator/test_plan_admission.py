"""A queued job reports it, its clocks stop, and preemption does not count against its budget."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from sluice_operator.plan import KubeObject, Observed, Progress, plan
from sluice_operator.plan.facts import clock
from sluice_operator.plan.report.admission import admitted, is_queued, waits
from tests.unit.operator.world import START, World, job_pass, make_job, make_pod

WHOLE = "demo-group-1234-1"
KUEUE = {"podGroupPolicy": {"kueue": {"queueName": "team-a"}}}
ALL = ("trainer", "rollout", "buffer", "rendezvous")
GATE, QUEUE = "kueue.x-k8s.io/admission", "kueue.x-k8s.io/queue-name"


def queued(**spec: object) -> World:
    world = World(make_job(**KUEUE, **spec))
    world.gated_roles = ALL
    world.settle()
    return world


def message(world: World, kind: str) -> str:
    entry = world.status.condition(kind)  # type: ignore[arg-type]
    assert entry is not None
    return entry.message


def workload(**unmet: str) -> KubeObject:
    """Kueue's word on a group. unmet: condition -> why it is not met; empty: it is."""
    conditions = [
        {"type": kind, "status": str(not why), "message": why} for kind, why in unmet.items()
    ]
    return {"kind": "Workload", "metadata": {"name": WHOLE}, "status": {"conditions": conditions}}


def condition(world: World, kind: str) -> tuple[str, str]:
    entry = world.status.condition(kind)  # type: ignore[arg-type]
    assert entry is not None
    return entry.status, entry.reason


def test_a_queued_job_says_so_and_where_to_look() -> None:
    world = queued()
    assert world.status.state == "Queued"
    assert condition(world, "Admitted") == ("False", "WaitingForQueue")
    assert condition(world, "Running") == ("False", "WaitingForQueue")
    assert (
        message(world, "Admitted")
        == "demo-trainer-0-1-0 and 3 more wait for admission by queue team-a; see kubectl describe "
        f"workload {WHOLE}"
    )


def test_a_queued_job_gives_the_queues_own_words() -> None:
    world = queued()
    world.objects["Workload", WHOLE] = workload(
        QuotaReserved="insufficient unused quota for cpu, 4 more needed"
    )
    world.settle()
    assert "team-a: insufficient unused quota for cpu, 4 more needed; see" in message(
        world, "Admitted"
    )
    assert (
        message(world, "Running")
        == "the job waits in a queue: insufficient unused quota for cpu, 4 more needed"
    )
    world.objects["Workload", WHOLE] = workload(
        QuotaReserved="", Admitted="waits for the admission check budget"
    )
    world.settle()
    assert "team-a: waits for the admission check budget; see" in message(world, "Admitted")


def test_a_job_that_waits_too_long_fails_with_the_cause() -> None:
    world = queued(queueTimeoutSeconds=600)
    world.objects["Workload", WHOLE] = workload(QuotaReserved="LocalQueue team-a doesn't exist")
    world.advance(599)
    world.settle()
    assert world.status.state == "Queued"
    world.advance(1)
    world.settle()
    assert world.status.state == "Failed"
    assert world.status.condition("Failed").reason == "QueueTimeoutExceeded"  # type: ignore[union-attr]
    detail = (
        "the job waited in a queue for 600 s (queueTimeoutSeconds): LocalQueue team-a doesn't exist"
    )
    assert message(world, "Failed") == detail
    assert world.status.queued_time is None


def test_the_time_in_a_queue_is_counted_anew_after_each_admission() -> None:
    world = queued(queueTimeoutSeconds=600)
    world.advance(500)
    world.admit(*ALL)
    world.settle()
    world.advance(500)
    for name in [*world.names("trainer"), *world.names("rollout")]:
        world.vanish(name)
    world.settle()
    world.advance(2)
    world.settle()
    assert world.status.state == "Queued"
    assert world.status.queued_time == clock.text(world.now)


def test_a_job_in_a_queue_is_looked_at_again_for_the_queues_words_may_change() -> None:
    world = queued()
    assert world.plan().requeue_after == 30


def test_the_clocks_stand_still_in_a_queue() -> None:
    world = queued(startupDeadlineSeconds=60, activeDeadlineSeconds=100)
    assert world.status.start_time is None
    world.advance(86400)
    world.settle()
    assert world.status.state == "Queued"
    world.admit(*ALL)
    world.settle()
    assert world.status.start_time == clock.text(START + timedelta(seconds=86400))
    assert condition(world, "Admitted")[0] == "True"
    world.advance(60)
    world.settle()
    assert world.status.condition("Failed").reason == "StartupDeadlineExceeded"  # type: ignore[union-attr]


def test_one_engine_in_the_queue_holds_nothing_while_another_is_admitted() -> None:
    """It is above minReplicas, which is 1."""
    world = World(make_job(**KUEUE, rollout={"replicas": 2}))
    world.gated_roles = ("rollout",)
    world.settle()
    del world.pods["demo-rollout-0-1-0"]["spec"]["schedulingGates"]
    world.settle()
    assert world.status.start_time is not None
    assert condition(world, "Admitted") == ("False", "WaitingForQueue")
    assert condition(world, "Running")[1] != "WaitingForQueue"


def test_a_trainer_in_the_queue_holds_the_job() -> None:
    world = World(make_job(**KUEUE))
    world.gated_roles = ("trainer",)
    world.settle()
    assert world.status.state == "Queued"


def test_a_preempted_gang_queues_again_and_has_lost_no_restart() -> None:
    world = queued(trainer={"nodes": 2})
    world.admit(*ALL)
    world.settle()
    world.progress = Progress(3, engines=1, engines_in_sync=1)
    world.settle()
    assert world.status.state == "Running"
    for name in world.names(
        "trainer"
    ):  # as Kueue does when it evicts a group: a condition, then a deletion
        pod = world.pods[name]
        reason = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted"}
        pod["status"]["conditions"].append(reason)
        pod["metadata"]["deletionTimestamp"] = clock.text(world.now)
    world.settle()
    assert any("WorkloadEvicted" in event.message for event in world.events)
    world.advance(2)
    world.settle()
    assert world.names("trainer") == ["demo-trainer-0-2-0", "demo-trainer-0-2-1"]
    assert world.status.state == "Queued"
    assert world.status.restarts == 0
    assert world.names("rollout") == ["demo-rollout-0-1-0"], "engines keep their place"


@pytest.mark.parametrize(
    ("policy", "role", "scheduled", "expected"),
    [
        ({"volcano": {}}, "trainer", False, True),
        ({"native": {}}, "rollout", False, True),
        ({"volcano": {}}, "trainer", True, False),
        ({"volcano": {}}, "buffer", False, False),
        ({"kueue": {"queueName": "q"}}, "buffer", False, False),
        (None, "trainer", False, False),
    ],
    ids=str,
)
def test_where_gangs_get_their_places_together_a_pod_without_one_waits(
    policy: dict[str, object] | None, role: str, scheduled: bool, expected: bool
) -> None:
    condition = {
        "type": "PodScheduled",
        "status": str(scheduled),
        "message": "2/3 tasks in gang unschedulable",
    }
    pod = make_pod(role, phase="Pending", conditions=[condition])
    job = make_job(**({"podGroupPolicy": policy} if policy else {}))
    assert waits(job, pod) is expected
    if expected:
        text = admitted(job_pass(job, Observed((pod,)))).message
        assert text.endswith(": 2/3 tasks in gang unschedulable")


def test_a_gate_of_somebody_else_is_respected_without_a_policy() -> None:
    pod = make_pod(phase="Pending")
    pod["spec"]["schedulingGates"] = [{"name": "example.com/wait"}]
    finding = admitted(job_pass(make_job(), Observed((pod,))))
    assert finding.reason == "WaitingForQueue"
    assert finding.message == (
        "demo-trainer-0-1-0 waits for admission by a queue: scheduling gate example.com/wait"
    )
    assert admitted(job_pass(make_job(), Observed((make_pod(),)))).status == "True"


@pytest.mark.parametrize("role", ["trainer", "buffer", "rendezvous"])
def test_a_pod_that_the_job_cannot_do_without_holds_the_job_in_the_queue(role: str) -> None:
    world = World(make_job(**KUEUE, queueTimeoutSeconds=600))
    world.gated_roles = (role,)
    world.settle()
    assert world.status.state == "Queued"
    world.advance(600)
    world.settle()
    assert world.status.condition("Failed").reason == "QueueTimeoutExceeded"  # type: ignore[union-attr]


def queued_by_default(*roles: str, **spec: object) -> World:
    """A job that names no queue, in a namespace with a LocalQueue `default`."""
    world = World(make_job(**spec))
    world.gated_roles = roles
    world.settle()
    for name, pod in world.pods.items():
        pod["metadata"] |= {"uid": name}
        pod["metadata"]["labels"][QUEUE] = "default"
    return world


def test_a_pod_that_is_queued_apart_is_named_with_its_queue_its_workload_and_a_cure() -> None:
    world = queued_by_default("buffer", queueTimeoutSeconds=600)
    lone = workload(QuotaReserved="insufficient unused quota for pods, 1 more needed")
    lone["metadata"] = {"name": "pod-1f3a", "ownerReferences": [{"uid": "demo-buffer-0-1-0"}]}
    other = workload(QuotaReserved="of another pod")
    other["metadata"] = {"name": "pod-2", "ownerReferences": [{"uid": "demo-trainer-0-1-0"}]}
    world.objects |= {("Workload", "pod-2"): other, ("Workload", "pod-1f3a"): lone}
    world.settle()
    words = "insufficient unused quota for pods, 1 more needed"
    cure = (
        "Kueue queues each pod of this job separately, so jobs can block each other: set "
        "podGroupPolicy.kueue.queueName"
    )
    assert message(world, "Admitted") == (
        f"demo-buffer-0-1-0 waits for admission by queue default: {words}; see kubectl describe "
        f"workload pod-1f3a; {cure}"
    )
    detail = f"demo-buffer-0-1-0 in queue default: {words}; {cure}"
    assert world.status.state == "Queued"
    assert message(world, "Running") == f"the job waits in a queue: {detail}"
    world.advance(600)
    world.settle()
    assert message(world, "Failed") == (
        f"the job waited in a queue for 600 s (queueTimeoutSeconds): {detail}"
    )


def episode(index: int, *, gated: bool, created: datetime = START) -> KubeObject:
    pod = make_pod("episode", index=index, phase="Pending" if gated else "Running")
    pod["metadata"] |= {"creationTimestamp": clock.text(created), "uid": f"e{index}"}
    pod["metadata"]["labels"][QUEUE] = "default"
    pod["spec"] |= {"schedulingGates": [{"name": GATE}]} if gated else {}
    return pod


@pytest.mark.parametrize(
    ("episodes", "held"),
    [
        pytest.param([episode(0, gated=True), episode(1, gated=True)], True, id="all are held"),
        pytest.param([episode(0, gated=True), episode(1, gated=False)], False, id="one plays"),
        pytest.param(
            [episode(0, gated=True, created=START + timedelta(seconds=59))], False, id="just made"
        ),
    ],
)
def test_a_job_none_of_whose_episodes_may_run_is_queued(
    episodes: list[KubeObject], held: bool
) -> None:
    """Pods of a pool come and go, each through its gate: a moment is not told."""
    job, now = make_job(**KUEUE), START + timedelta(seconds=60)
    current = job_pass(job, Observed(episodes=tuple(episodes)), now)
    assert is_queued(current, []) is held
    finding = admitted(current)
    assert finding.status == str(not held)
    if held:
        who = "demo-episode-0-1-0 and 1 more wait for admission by queue default"
        assert finding.message.startswith(who)
        assert "episode pods need quota in addition to the job's" in finding.message


def test_a_trainer_whose_episodes_a_queue_holds_does_not_hang() -> None:
    world = World(make_job(**KUEUE, progressDeadlineSeconds=100))
    world.progress = Progress(3, engines=1, engines_in_sync=1)
    world.settle()
    assert world.status.state == "Running"
    observed = world.observed()
    observed = replace(observed, pods=(*observed.pods, episode(0, gated=True)))
    status = plan(world.job, observed, START + timedelta(seconds=60)).status
    assert status.state == "Queued"
    late = plan(world.job, replace(observed, status=status), START + timedelta(seconds=1000))
    assert late.status.state == "Queued"
    assert late.status.gang("trainer", 0).attempt == 1  # type: ignore[union-attr]


READY = "Exceeded the PodsReady timeout default/demo-group-1234-1"
RAISE = "Kueue's waitForPodsReady.timeout is shorter than this job takes to start: have it raised"


def evicted(reason: str, message: str, unmet: str, *, active: bool = True) -> KubeObject:
    stored = workload(QuotaReserved=unmet)
    condition = {"type": "Evicted", "status": "True", "reason": reason, "message": message}
    stored["status"]["conditions"].append(condition)
    return stored | {"spec": {"active": active}}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        pytest.param(
            evicted("PodsReadyTimeout", READY, READY), f"{READY}; {RAISE}", id="backs off"
        ),
        pytest.param(
            evicted("PodsReadyTimeout", READY, "insufficient unused quota"),
            f"{READY}; insufficient unused quota; {RAISE}",
            id="waits again",
        ),
        pytest.param(
            evicted("Preempted", "Preempted to make room", "insufficient unused quota"),
            "insufficient unused quota",
            id="preempted",
        ),
        pytest.param(
            evicted(
                "Deactivated",
                "The workload is deactivated due to exceeding the maximum number of re-queuing "
                "retries",
                READY,
                active=False,
            ),
            "The workload is deactivated due to exceeding the maximum number of re-queuing "
            f"retries; {RAISE}, then suspend and resume the job",
            id="given up",
        ),
        pytest.param(
            evicted("Deactivated", "The workload is deactivated", "", active=False),
            "The workload is deactivated; a person or an admission check has set the Workload's "
            "spec.active to false: suspend and resume the job to queue again",
            id="deactivated by somebody",
        ),
    ],
)
def test_a_job_that_kueue_has_evicted_says_why_and_what_to_do(
    stored: KubeObject, words: str
) -> None:
    world = queued()
    world.objects["Workload", WHOLE] = stored
    world.settle()
    assert f"queue team-a: {words}; see kubectl" in message(world, "Admitted")
    assert message(world, "Running") == f"the job waits in a queue: {words}"


def test_an_eviction_of_pods_that_were_not_ready_in_time_is_an_event_with_a_cure() -> None:
    world = World(make_job(**KUEUE))
    world.settle()
    pod = world.pods["demo-trainer-0-1-0"]
    target = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted"}
    pod["status"]["conditions"].append(target | {"message": READY})
    world.step()
    assert world.events[-1].message == (
        f"trainer-0 was disrupted: demo-trainer-0-1-0: WorkloadEvicted: {READY}; {RAISE}; "
        "attempt 2 follows"
    )
