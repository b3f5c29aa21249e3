"""Pods of episodes that Sandboxes make: what is created and deleted, and what a job says."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sluice.api import RLJob
from sluice_operator.plan import KubeObject, Observed, Plan, plan
from sluice_operator.plan.decide.deletion import drain
from sluice_operator.plan.decide.episodes import EpisodePod, EpisodeSlot
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.model import Images
from sluice_operator.plan.manifests.episodes import episode_pod
from sluice_operator.plan.manifests.sandbox import best_version, sandbox
from tests.unit.operator.world import START, make_job, make_pod

GROUP = "agents.x-k8s.io"
IMAGE = {"command": ["agent"], "image": "me/agent:1", "pods": 2, "sandbox": {}}


def agent_job(environment: dict[str, Any] | None = None, **spec: Any) -> RLJob:
    return make_job(
        rollout={"gpusPerReplica": 0, "environment": IMAGE | (environment or {})}, **spec
    )


def planned(job: RLJob, *pods: KubeObject, version: str = "v1beta1", **observed: Any) -> Plan:
    facts = {"operator_namespace": "sluice-system", "sandbox_version": version} | observed
    return plan(job, Observed(pods, **facts), START)


def engine() -> KubeObject:
    return make_pod("rollout", podIP="10.0.0.7")


def a_sandbox(index: int, number: int = 1, *, seconds: float = 0, **ready: str) -> KubeObject:
    """ready: reason and message of its condition; seconds: its age."""
    like = make_pod("episode", index=index)["metadata"]
    conditions = [{"type": "Ready", "status": "False", **ready}] if ready else []
    metadata = {
        "name": f"{like['name']}-{number}",
        "labels": like["labels"] | {"sluice.dev/number": str(number)},
        "creationTimestamp": clock.text(START - timedelta(seconds=seconds)),
    }
    return {"kind": "Sandbox", "metadata": metadata, "status": {"conditions": conditions}}


def episode(index: int, number: int = 1, **fields: Any) -> KubeObject:
    """A pod that a Sandbox has made."""
    pod, maker = make_pod("episode", index=index, **fields), a_sandbox(index, number)["metadata"]
    owner = {"apiVersion": f"{GROUP}/v1beta1", "kind": "Sandbox", "name": maker["name"]}
    pod["metadata"] |= maker | {"ownerReferences": [{**owner, "uid": "s", "controller": True}]}
    return pod


def leaving(stored: KubeObject) -> KubeObject:
    at = clock.text(START + timedelta(seconds=5))
    return {**stored, "metadata": stored["metadata"] | {"deletionTimestamp": at}}


def created(decided: Plan) -> list[str]:
    return [item["metadata"]["name"] for item in decided.create if item["kind"] == "Sandbox"]


def deleted(decided: Plan) -> list[tuple[str, str]]:
    return [(item.kind, item.name) for item in decided.delete if "-episode-" in item.name]


def said(decided: Plan) -> str:
    condition = decided.status.condition("Running")
    assert condition is not None
    return condition.message


def of_pod(version: str = "v1beta1", **template: Any) -> tuple[KubeObject, KubeObject]:
    """A pod, and the Sandbox that makes it."""
    job = agent_job({"template": template})
    pod = episode_pod(job, EpisodePod(EpisodeSlot("episode", 0, 1, 0, "10.0.0.7"), 4), Images())
    return pod, sandbox(job, pod, version)


def test_a_sandbox_makes_the_whole_pod_and_never_twice() -> None:
    pod, its_sandbox = of_pod(spec={"runtimeClassName": "gvisor"})
    template = its_sandbox["spec"]["podTemplate"]
    assert its_sandbox["spec"].keys() == {"podTemplate"}
    assert template["spec"] == pod["spec"]
    assert (template["spec"]["restartPolicy"], template["spec"]["runtimeClassName"]) == (
        "Never",
        "gvisor",
    )


def test_a_sandbox_is_the_jobs_and_its_pod_says_so() -> None:
    pod, its_sandbox = of_pod(metadata={"labels": {"team": "a"}, "annotations": {"cost": "b"}})
    ours, shared = its_sandbox["metadata"], its_sandbox["spec"]["podTemplate"]["metadata"]
    assert (ours["name"], ours["ownerReferences"]) == (
        pod["metadata"]["name"],
        pod["metadata"]["ownerReferences"],
    )
    assert shared["labels"] == pod["metadata"]["labels"] | {"sluice.dev/job-uid": "1234"}
    assert shared["labels"]["team"] == "a"
    assert shared["annotations"] == {"cost": "b"}
    assert {key: ours[key] for key in shared} == shared


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        pytest.param(["v1beta1", "v1alpha1"], "v1beta1", id="both"),
        pytest.param(["v1alpha1"], "v1alpha1", id="an older release"),
        pytest.param(["v2", "v1beta1"], "v1beta1", id="a newer one beside"),
        pytest.param(["v2"], "", id="none that we know"),
    ],
)
def test_the_newest_version_that_both_know_is_spoken(served: list[str], expected: str) -> None:
    assert best_version(served) == expected


def test_a_warm_pool_is_made_in_the_version_that_is_served() -> None:
    decided = planned(agent_job(), engine(), version="v1alpha1")
    assert created(decided) == ["demo-episode-0-1-0-1", "demo-episode-0-1-1-1"]
    assert {item["apiVersion"] for item in decided.create if item["kind"] == "Sandbox"} == {
        f"{GROUP}/v1alpha1"
    }


def test_a_verifier_has_sandboxes_too() -> None:
    verifier = {"verifier": {"command": ["judge"], "pods": 1}}
    assert "demo-verifier-0-1-0-1" in created(planned(agent_job(verifier), engine()))


@pytest.mark.parametrize(
    ("pods", "sandboxes", "expected"),
    [
        pytest.param([], [a_sandbox(0), a_sandbox(1)], [], id="their pods are to come"),
        pytest.param([episode(0)], [a_sandbox(0), a_sandbox(1)], [], id="one has its pod"),
        pytest.param(
            [episode(0, 6, phase="Succeeded"), episode(1)],
            [a_sandbox(0, 6), a_sandbox(1)],
            ["demo-episode-0-1-0-7"],
            id="one has ended",
        ),
        pytest.param(
            [leaving(episode(0, 6)), episode(1)],
            [a_sandbox(0, 6), a_sandbox(1)],
            ["demo-episode-0-1-0-7"],
            id="its pod was deleted",
        ),
        pytest.param(
            [],
            [leaving(a_sandbox(0, 6)), a_sandbox(1)],
            ["demo-episode-0-1-0-7"],
            id="a finalizer keeps one that ends",
        ),
    ],
)
def test_each_place_has_a_sandbox(
    pods: list[KubeObject], sandboxes: list[KubeObject], expected: list[str]
) -> None:
    decided = planned(agent_job(), engine(), *pods, sandboxes=tuple(sandboxes))
    assert created(decided) == expected


@pytest.mark.parametrize(
    ("pods", "sandboxes", "expected"),
    [
        pytest.param([episode(0), episode(1)], [a_sandbox(0), a_sandbox(1)], [], id="at work"),
        pytest.param(
            [episode(0, phase="Succeeded")],
            [a_sandbox(0)],
            [("Sandbox", "demo-episode-0-1-0-1")],
            id="ended",
        ),
        pytest.param(
            [leaving(episode(0))],
            [a_sandbox(0)],
            [("Sandbox", "demo-episode-0-1-0-1")],
            id="its pod was deleted, and would come again",
        ),
        pytest.param([leaving(episode(0))], [], [], id="its pod goes with it"),
        pytest.param(
            [episode(2)],
            [a_sandbox(2)],
            [("Sandbox", "demo-episode-0-1-2-1")],
            id="without a place",
        ),
        pytest.param(
            [],
            [a_sandbox(2)],
            [("Sandbox", "demo-episode-0-1-2-1")],
            id="without a place and a pod",
        ),
        pytest.param([], [leaving(a_sandbox(2))], [], id="it goes already"),
    ],
)
def test_what_is_over_goes_with_its_sandbox(
    pods: list[KubeObject], sandboxes: list[KubeObject], expected: list[tuple[str, str]]
) -> None:
    decided = planned(agent_job(), engine(), *pods, sandboxes=tuple(sandboxes))
    assert deleted(decided) == expected


def test_a_job_that_is_deleted_takes_the_sandboxes() -> None:
    """An operator that has just started knows only the pods."""
    gone = drain([episode(0), engine()], START)
    assert [(item.kind, item.name) for item in gone] == [
        ("Sandbox", "demo-episode-0-1-0-1"),
        ("Pod", "demo-rollout-0-1-0"),
    ]


def test_a_suspended_job_has_none() -> None:
    decided = planned(
        agent_job(suspend=True), engine(), episode(0), sandboxes=(a_sandbox(0), a_sandbox(1))
    )
    assert deleted(decided) == [
        ("Sandbox", "demo-episode-0-1-0-1"),
        ("Sandbox", "demo-episode-0-1-1-1"),
    ]


def test_a_cluster_without_sandboxes_is_told_once_and_starts_nothing() -> None:
    first = planned(agent_job(), version="")
    assert (first.create, first.requeue_after) == ((), 10)
    (event,) = (item for item in first.events if item.reason == "ApiMissing")
    assert "install kubernetes-sigs' agent-sandbox, or remove the field" in event.message
    assert said(first).endswith(event.message)
    again = planned(agent_job(), version="", status=first.status)
    assert "ApiMissing" not in [item.reason for item in again.events]
    cured = planned(agent_job(), status=first.status)
    assert cured.create
    assert "sandbox" not in said(cured)


@pytest.mark.parametrize(
    ("job", "observed"),
    [
        pytest.param(agent_job(), {"operator_namespace": None}, id="on a laptop"),
        pytest.param(agent_job({"sandbox": None}), {}, id="plain pods"),
    ],
)
def test_who_needs_no_sandbox_is_not_held_back(job: RLJob, observed: dict[str, Any]) -> None:
    decided = planned(job, engine(), version="", **observed)
    assert decided.create
    assert created(decided) == []


REFUSED = "Error seen: exceeded quota: small, requested"


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        pytest.param(a_sandbox(0), "", id="new"),
        pytest.param(
            a_sandbox(0, seconds=31),
            "0-1-0-1: NoPod: this Sandbox has no pod; check that agent-sandbox's",
            id="nobody takes it up",
        ),
        pytest.param(
            a_sandbox(0, reason="ReconcilerError", message=REFUSED),
            "0-1-0-1: ReconcilerError: Error seen: exceeded quota: small, requested; wait for",
            id="its pod is refused",
        ),
        pytest.param(
            a_sandbox(0, seconds=31, reason="DependenciesNotReady", message="Pod does not exist"),
            "0-1-0-1: DependenciesNotReady: Pod does not exist",
            id="its controller waits",
        ),
    ],
)
def test_why_a_sandbox_has_no_pod_is_told_by_the_job(waiting: KubeObject, expected: str) -> None:
    alone = planned(agent_job(), engine(), sandboxes=(waiting,))
    beside = planned(agent_job(), engine(), episode(1), sandboxes=(waiting, a_sandbox(1)))
    assert expected in said(alone)
    assert "0-1-0-1:" not in said(beside), "the pool is smaller, and the job goes on"
    assert alone.requeue_after is not None
    assert alone.requeue_after <= 10
