"""The group in which a job is admitted: its size, successor, and how Kueue learns of its end."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.api import PodGroupStatus
from sluice_operator.plan import Deletion, KubeObject
from sluice_operator.plan.decide.pod_groups import finished_groups
from sluice_operator.plan.facts import clock, podstate
from tests.unit.operator.world import START, World, make_job, make_pod

KUEUE: dict[str, Any] = {"podGroupPolicy": {"kueue": {"queueName": "team-a"}}}
FIRST, SECOND = "demo-group-1234-1", "demo-group-1234-2"
FINALIZER, RETRIABLE = "kueue.x-k8s.io/managed", "kueue.x-k8s.io/retriable-in-group"


def of_group(
    role: str, phase: str, *, group: str = FIRST, deleted: bool = False, marked: bool = False
) -> KubeObject:
    """A pod that Kueue queues. phase Pending: behind its gate."""
    pod = make_pod(role, phase=phase)
    pod["metadata"]["labels"]["sluice.dev/pod-group"] = group
    pod["metadata"] |= {"finalizers": [FINALIZER]}
    pod["metadata"] |= {"deletionTimestamp": clock.text(START)} if deleted else {}
    pod["metadata"] |= {"annotations": {RETRIABLE: "false"}} if marked else {}
    pod["spec"] |= {} if phase == "Pending" else {"nodeName": "somewhere"}
    return pod


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param(
            [of_group("trainer", "Succeeded"), of_group("rollout", "Failed")],
            True,
            id="all have ended",
        ),
        pytest.param(
            [of_group("trainer", "Succeeded"), of_group("rollout", "Running")],
            False,
            id="one still runs",
        ),
        pytest.param(
            [of_group("trainer", "Succeeded", marked=True), of_group("rollout", "Failed")],
            False,
            id="told already",
        ),
        pytest.param(
            [of_group("trainer", "Pending", deleted=True)], True, id="deleted behind its gate"
        ),
        pytest.param(
            [of_group("rollout", "Pending", deleted=True, marked=True)],
            True,
            id="deleted behind its gate, alone",
        ),
        pytest.param([of_group("trainer", "Pending")], False, id="waits behind its gate"),
        pytest.param([of_group("trainer", "Running", deleted=True)], False, id="ends"),
        pytest.param([make_pod("trainer", phase="Succeeded")], False, id="of no group"),
    ],
)
def test_kueue_is_told_the_end_of_a_group_once_none_of_its_pods_runs(
    pods: list[KubeObject], expected: bool
) -> None:
    assert finished_groups(pods) == ((Deletion("Workload", FIRST),) if expected else ())
    assert finished_groups(pods, present=[FIRST]) == (), (
        "while the group goes on, its pods are replaced"
    )


def test_pods_that_kueue_does_not_keep_need_no_end() -> None:
    pod = of_group("trainer", "Succeeded")
    del pod["metadata"]["finalizers"]
    assert finished_groups([pod]) == ()


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        pytest.param({"replicas": 3}, 1, id="default"),
        pytest.param({"replicas": 3, "minReplicas": 2}, 2, id="some engines"),
        pytest.param({"minReplicas": 2}, 2, id="an autoscaler's engines"),
        pytest.param({"replicas": 0}, 0, id="no engines"),
    ],
)
def test_engines_in_the_group(rollout: dict[str, int], expected: int) -> None:
    world = World(make_job(**KUEUE, rollout=rollout))
    world.settle()
    assert world.status.pod_group == PodGroupStatus(number=1, replicas=expected, services=True)
    whole = [name for name in world.names() if podstate.group(world.pods[name]) == FIRST]
    assert len(whole) == expected + 3


def test_a_job_without_a_policy_has_no_group() -> None:
    world = World(make_job())
    world.settle()
    assert world.status.pod_group is None


def test_scaling_changes_no_group() -> None:
    world = World(make_job(**KUEUE, rollout={"replicas": 0}))
    world.settle()
    world.job = make_job(**KUEUE, rollout={"replicas": 2})
    world.settle()
    assert world.status.pod_group == PodGroupStatus(number=1, replicas=0, services=True)
    whole = {f"demo-{role}-0-1-0": FIRST for role in ("trainer", "buffer", "rendezvous")}
    assert groups(world) == {**whole, **alone(0), **alone(1)}


def alone(replica: int, attempt: int = 1) -> dict[str, str]:
    return {f"demo-rollout-{replica}-{attempt}-0": f"demo-rollout-{replica}-{attempt}"}


def groups(world: World) -> dict[str, str]:
    """Pod -> group, of those that queue."""
    return {name: podstate.group(pod) for name, pod in world.pods.items() if podstate.group(pod)}


def test_a_gang_that_restarts_stays_in_the_group_and_waits_for_no_pod_that_only_kueue_keeps() -> (
    None
):
    world = World(make_job(**KUEUE))
    world.settle()
    world.pods["demo-trainer-0-1-0"]["spec"]["nodeName"] = "somewhere"
    world.pods["demo-trainer-0-1-0"]["metadata"] |= {
        "deletionTimestamp": clock.text(world.now),
        "finalizers": [FINALIZER],
    }
    world.step()
    world.advance(2)
    world.step()
    assert "demo-trainer-0-2-0" not in world.pods, "the first one still runs"
    world.pods["demo-trainer-0-1-0"]["status"]["phase"] = "Failed"
    world.step()
    assert groups(world)["demo-trainer-0-2-0"] == FIRST
    assert world.status.pod_group == PodGroupStatus(number=1, replicas=1, services=True)


def test_a_suspended_job_comes_back_in_another_group() -> None:
    world = World(make_job(**KUEUE))
    world.settle()
    world.job = make_job(**KUEUE, suspend=True)
    world.settle()
    world.settle()
    assert world.status.pod_group == PodGroupStatus(number=2, replicas=1, services=True)
    world.job = make_job(**KUEUE)
    world.settle()
    assert set(groups(world).values()) == {SECOND}


def test_a_pod_that_ended_well_and_is_replaced_takes_the_job_into_another_group() -> None:
    """For Kueue it is done for ever: its replacement would be one pod too many."""
    world = World(make_job(**KUEUE, trainer={"nodes": 2}))
    world.settle()
    first = world.pods["demo-trainer-0-1-0"]
    first["metadata"]["finalizers"] = [FINALIZER]
    first["spec"]["nodeName"] = "somewhere"
    world.end("demo-trainer-0-1-0", 0)
    world.end("demo-trainer-0-1-1", 1)
    for _ in range(4):
        world.step()
        world.advance(10)
    world.settle()
    assert world.status.pod_group == PodGroupStatus(number=2, replicas=1, services=True)
    assert set(groups(world).values()) == {SECOND}
    assert world.status.restarts == 1


def test_pods_of_an_older_release_move_into_the_group_when_one_of_them_is_replaced() -> None:
    """An older release made a group for each gang.

    A group with only the trainer's replacement would never be whole.
    """
    world = World(make_job(**KUEUE))
    world.settle()
    for name in world.names():
        del world.pods[name]["metadata"]["labels"]["sluice.dev/pod-group"]
    world.settle()
    assert world.names("trainer") == ["demo-trainer-0-1-0"], "the new release alone disturbs nobody"
    world.vanish("demo-trainer-0-1-0")
    for _ in range(6):
        world.step()
        world.advance(2)
        world.remove_terminating()
    world.settle()
    assert world.names("rollout") == ["demo-rollout-0-2-0"]
    assert set(groups(world).values()) == {SECOND}
    assert world.status.restarts == 0


def of_an_older_release() -> World:
    """A job whose services are in no group, as before groups held them."""
    world = World(make_job(**KUEUE))
    world.settle()
    assert world.stored is not None
    del world.stored["podGroup"]["services"]
    for name in (*world.names("buffer"), *world.names("rendezvous")):
        del world.pods[name]["metadata"]["labels"]["sluice.dev/pod-group"]
    world.settle()
    return world


@pytest.mark.parametrize("role", ["trainer", "rollout", "buffer"])
def test_a_group_of_an_older_release_goes_on_without_the_services(role: str) -> None:
    """The size of the group is fixed, and only the lost pod is replaced."""
    world = of_an_older_release()
    assert {podstate.attempt(pod) for pod in world.pods.values()} == {1}
    world.vanish(f"demo-{role}-0-1-0")
    for _ in range(3):
        world.step()
        world.advance(2)
    world.settle()
    second = [name for name, pod in world.pods.items() if podstate.attempt(pod) == 2]
    assert second == [f"demo-{role}-0-2-0"]
    assert sorted(groups(world)) == sorted((*world.names("rollout"), *world.names("trainer")))


def test_the_services_are_in_the_next_group_of_a_job_of_an_older_release() -> None:
    world = of_an_older_release()
    world.job = make_job(**KUEUE, suspend=True)
    world.settle()
    world.settle()
    world.job = make_job(**KUEUE)
    world.settle()
    assert groups(world) == dict.fromkeys(world.names(), SECOND)


def test_without_kueue_services_are_in_no_group() -> None:
    world = World(make_job(podGroupPolicy={"volcano": {}}))
    world.settle()
    assert world.status.pod_group == PodGroupStatus(number=1, replicas=1)
    assert sorted(groups(world)) == ["demo-rollout-0-1-0", "demo-trainer-0-1-0"]


def with_further_engine() -> World:
    """A job of a trainer and two engines, one of which is above minReplicas."""
    world = World(make_job(**KUEUE, rollout={"replicas": 2}))
    world.gated_roles = ("trainer", "rollout")
    world.settle()
    return world


def test_a_further_engine_is_made_when_the_jobs_group_has_its_places() -> None:
    """An engine that is admitted earlier could take the place that the group waits for."""
    world = with_further_engine()
    assert world.names("rollout") == ["demo-rollout-0-1-0"]
    world.admit("trainer", "rollout")
    world.settle()
    assert world.names("rollout") == ["demo-rollout-0-1-0", "demo-rollout-1-1-0"]


def test_a_further_engine_gives_its_place_back_when_a_queue_holds_the_job() -> None:
    world = with_further_engine()
    for _ in range(2):
        world.admit("trainer", "rollout")
        world.settle()
    world.vanish("demo-trainer-0-1-0")
    world.settle()
    world.advance(2)
    world.settle()
    assert world.status.state == "Queued"
    assert "demo-rollout-1-1-0" in world.names("rollout"), "a restart alone ends no engine"
    assert world.plan().requeue_after == 30
    world.advance(60)
    world.settle()
    assert world.names("rollout") == ["demo-rollout-0-1-0"]
    world.admit("trainer")
    world.settle()
    assert world.names("rollout") == ["demo-rollout-0-1-0", "demo-rollout-1-2-0"]
