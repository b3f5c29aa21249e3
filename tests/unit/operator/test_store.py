"""The memory between watches and the reconciler: the newest version wins, the dead stay dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sluice_operator.cluster.kube.store import GRAVES_SECONDS, Store, compact, lean_pod
from sluice_operator.plan import KubeObject
from sluice_operator.plan.facts import podstate
from sluice_operator.plan.report.blocked import blocked
from tests.unit.operator.world import START, make_pod

KEY = ("ns", "demo")


def pod(name: str = "p", version: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version), **more}
    }


def make(clock: Any = lambda: 0.0) -> Store:
    return Store(
        lambda document: KEY if "alien" not in document["metadata"]["name"] else None,
        lambda document: document,
        clock,
    )


def test_an_older_version_from_the_watch_does_not_undo_our_own_write() -> None:
    store = make()
    assert store.put(pod(version=9))
    assert not store.put(pod(version=8))
    assert store.of_job(KEY) == [pod(version=9)]


def test_an_echo_is_no_news() -> None:
    store = make()
    assert [store.put(pod(version=9)), store.put(pod(version=9)), store.put(pod(version=10))] == [
        True,
        False,
        True,
    ]


def test_what_is_buried_does_not_come_back_with_a_late_event() -> None:
    store = make()
    store.put(pod())
    assert store.bury(pod())
    assert not store.put(pod(version=99))
    assert store.of_job(KEY) == []
    assert store.all_keys() == []


def test_graves_are_forgotten_in_the_end() -> None:
    now = [0.0]
    store = make(lambda: now[0])
    store.bury(pod("a"))
    now[0] = GRAVES_SECONDS + 1
    store.bury(pod("b"))
    assert store.put(pod("a"))
    assert not store.put(pod("b"))


def test_what_belongs_to_no_job_is_not_kept() -> None:
    assert not make().put(pod("alien"))


def test_a_sweep_buries_what_a_list_lacks_but_nothing_newer_than_the_list() -> None:
    store = make()
    for name, version in (("kept", 5), ("lost", 5), ("new", 20)):
        store.put(pod(name, version))
    assert [
        document["metadata"]["name"] for document in store.sweep({"uid-kept"}, list_version=10)
    ] == ["lost"]
    assert [document["metadata"]["name"] for document in store.of_job(KEY)] == ["kept", "new"]


def test_a_sweep_of_one_namespace_leaves_the_others() -> None:
    store = make()
    store.put(pod())
    assert store.sweep(set(), 10, "other") == []
    assert len(store.sweep(set(), 10, "ns")) == 1


def test_of_two_lives_of_one_name_the_newest_is_the_present_one() -> None:
    store = make()
    store.put(pod("first", 1))
    store.put(pod("second", 5))
    newest = store.newest(KEY)
    assert newest is not None
    assert newest["metadata"]["name"] == "second"


WAITS = {
    "name": "engine",
    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
}
UNPLACED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes",
}
VICTIM = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
PODS = {
    "ready": make_pod("rollout"),
    "failed": make_pod("trainer", phase="Failed", ends={"trainer": 1}, message="error: boom"),
    "evicted": make_pod("trainer", phase="Failed", reason="Evicted", message="low on memory"),
    "preempted": make_pod("trainer", conditions=[VICTIM]),
    "refused": make_pod("rollout", phase="Pending", containerStatuses=[WAITS]),
    "init": make_pod("trainer", phase="Pending", initContainerStatuses=[WAITS]),
    "unplaced": make_pod("trainer", phase="Pending", conditions=[UNPLACED]),
}
READERS: tuple[Callable[[KubeObject], Any], ...] = (
    podstate.name,
    podstate.role,
    podstate.replica,
    podstate.attempt,
    podstate.index,
    podstate.is_terminating,
    podstate.is_finished,
    podstate.is_gated,
    podstate.is_scheduled,
    podstate.unscheduled_because,
    podstate.is_ready,
    podstate.group,
    podstate.address,
    podstate.number,
    podstate.is_kept,
    podstate.has_left,
    podstate.ends_group,
    podstate.is_succeeded,
    podstate.is_starting,
    podstate.is_running,
    podstate.started,
    podstate.disruption,
    podstate.succeeded,
    lambda pod: podstate.failures(pod, START),
    lambda pod: podstate.config_error(pod, START),
    lambda pod: blocked([pod], {}),
)


def whole(pod: KubeObject) -> KubeObject:
    """With what an API server adds."""
    more: KubeObject = {
        "uid": "u",
        "resourceVersion": "7",
        "managedFields": [{}],
        "deletionTimestamp": "2026-01-31T12:00:00Z",
        "finalizers": ["kueue.x-k8s.io/managed"],
        "annotations": {"kueue.x-k8s.io/retriable-in-group": "false", "networks": "large"},
    }
    spec = {
        "nodeName": "n",
        "schedulingGates": [{"name": "g"}],
        "containers": [{"name": "c", "env": []}],
    }
    return {
        **pod,
        "metadata": pod["metadata"] | more,
        "spec": spec,
        "status": pod["status"] | {"podIP": "10.0.0.1", "qosClass": "Burstable"},
    }


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
@pytest.mark.parametrize("more", [lambda pod: pod, whole], ids=["", "whole"])
def test_the_planner_reads_the_same_from_a_lean_pod(
    pod: KubeObject, more: Callable[[KubeObject], KubeObject]
) -> None:
    pod = more(pod)
    assert [read(lean_pod(pod)) for read in READERS] == [read(pod) for read in READERS]


def test_a_lean_pod_lacks_what_nobody_reads() -> None:
    lean = lean_pod(whole(PODS["ready"]))
    assert "managedFields" not in lean["metadata"]
    assert "networks" not in lean["metadata"]["annotations"]
    assert "containers" not in lean["spec"]
    assert "qosClass" not in lean["status"]


def test_a_text_is_in_memory_once() -> None:
    first, second = (compact({"key": [{"a": "".join(["some ", "text"])}]}) for _ in range(2))
    assert first == {"key": [{"a": "some text"}]}
    assert first["key"][0]["a"] is second["key"][0]["a"]
