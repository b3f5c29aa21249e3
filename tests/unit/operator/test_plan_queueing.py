"""Pods and groups for Kueue, Volcano and Kubernetes' gang scheduling, as documented there."""

from typing import Any

import pytest
from kubernetes.client.models.v1_pod_scheduling_group import V1PodSchedulingGroup
from kubernetes.client.models.v1beta1_pod_group import V1beta1PodGroup

from sluice.api import PodGroupStatus
from sluice_operator.plan import KubeObject
from sluice_operator.plan.decide.pod_groups import group_of
from sluice_operator.plan.facts.model import Gang, Images, PodGroup
from sluice_operator.plan.manifests.pods import gang_pods
from sluice_operator.plan.manifests.queueing import group_object, requests
from sluice_operator.plan.manifests.render import render_all
from tests.unit.operator.world import make_job

TRAINER, ENGINE = Gang("trainer", 0, 2), Gang("rollout", 3, 1)
# Two trainer pods, two engines of one pod and the two services.
SHARED = PodGroupStatus(number=5, replicas=2, services=True)
KUEUE = {"kueue": {"queueName": "team-a", "priorityClass": "high"}}


def render(
    policy: dict[str, Any],
    gang: Gang,
    attempt: int = 2,
    shared: PodGroupStatus = SHARED,
    nodes: int = 1,
) -> tuple[PodGroup | None, list[KubeObject]]:
    shared = shared.model_copy(update={"services": shared.services and "kueue" in policy})
    rollout = {"replicas": 4, "minReplicas": 2, "nodesPerReplica": nodes, "gpusPerReplica": 1}
    wide = {"weightSync": {"transport": "disk"}} if nodes > 1 else {}
    job = make_job(
        podGroupPolicy=policy, trainer={"nodes": 2, "gpusPerNode": 8}, rollout=rollout, **wide
    )
    group = group_of(job, gang, attempt, shared)
    return group, gang_pods(job, gang, attempt, "10.0.0.1:7700", Images(), group)


def whole(policy: dict[str, Any]) -> KubeObject | None:
    """The object of the group in which the job is admitted."""
    pods = [
        pod
        for gang in (TRAINER, Gang("rollout", 0, 1), Gang("rollout", 1, 1))
        for pod in render(policy, gang)[1]
    ]
    group, _ = render(policy, TRAINER)
    assert group is not None
    return group_object(make_job(podGroupPolicy=policy), group, pods)


def of_kueue(marks: dict[str, str]) -> dict[str, str]:
    return {
        key.removeprefix("kueue.x-k8s.io/"): value
        for key, value in marks.items()
        if key.startswith("kueue")
    }


@pytest.mark.parametrize(
    ("gang", "kind"),
    [
        (TRAINER, "trainer"),
        (Gang("rollout", 1, 1), "engine"),
        (Gang("buffer", 0, 1), "buffer"),
        (Gang("rendezvous", 0, 1), "rendezvous"),
    ],
    ids=["trainer", "engine below minReplicas", "buffer", "rendezvous"],
)
def test_kueue_admits_all_that_a_job_cannot_do_without_as_one_group(gang: Gang, kind: str) -> None:
    _, pods = render(KUEUE, gang)
    ranks = {"trainer": [0, 1], "engine": [1]}.get(kind, [0])
    for pod, rank in zip(pods, ranks, strict=True):
        assert of_kueue(pod["metadata"]["labels"]) == {
            "queue-name": "team-a",
            "priority-class": "high",
            "pod-group-name": "demo-group-1234-5",
            "pod-group-pod-index": str(rank),
        }
        annotations = of_kueue(pod["metadata"]["annotations"])
        assert annotations == {"pod-group-total-count": "6", "role-hash": kind}
        assert "schedulingGates" not in pod["spec"], "the gate is Kueue's to set"


def test_replacements_join_the_group_of_those_that_they_replace() -> None:
    (_, before), (_, after) = render(KUEUE, TRAINER, attempt=2), render(KUEUE, TRAINER, attempt=3)
    for old, new in zip(before, after, strict=True):
        assert old["metadata"]["name"] != new["metadata"]["name"]
        for part in ("labels", "annotations"):
            assert of_kueue(old["metadata"][part]) == of_kueue(new["metadata"][part])


def test_each_further_engine_is_a_group_of_its_own_which_ends_with_it() -> None:
    _, (pod,) = render(KUEUE, ENGINE, attempt=7)
    labels, annotations = (
        of_kueue(pod["metadata"]["labels"]),
        of_kueue(pod["metadata"]["annotations"]),
    )
    assert (labels["pod-group-name"], labels["pod-group-pod-index"]) == ("demo-rollout-3-7", "0")
    assert annotations == {
        "pod-group-total-count": "1",
        "role-hash": "engine",
        "retriable-in-group": "false",
    }


def test_pods_of_one_kind_have_ranks_of_their_own() -> None:
    """Kueue's topology-aware scheduling orders the pods of each kind by them, from 0."""
    places = []
    for replica in range(2):
        _, pods = render(KUEUE, Gang("rollout", replica, 3), nodes=3)
        for pod in pods:
            annotations, labels = (
                of_kueue(pod["metadata"]["annotations"]),
                of_kueue(pod["metadata"]["labels"]),
            )
            places.append((annotations["role-hash"], labels["pod-group-pod-index"]))
            assert annotations["pod-group-total-count"] == "10"
    leaders = [("engine", "0"), ("engine", "1")]
    assert sorted(places) == leaders + [("engine-follower", str(rank)) for rank in range(4)]


def test_a_job_without_engines_is_admitted_by_its_trainer_alone() -> None:
    group, _ = render(KUEUE, TRAINER, shared=PodGroupStatus(number=1, replicas=0))
    assert group == PodGroup("demo-group-1234-1", 2)


@pytest.mark.parametrize("policy", [{"volcano": {}}, {"native": {}}], ids=str)
@pytest.mark.parametrize("role", ["buffer", "rendezvous"])
def test_services_queue_with_kueue_alone(policy: dict[str, Any], role: Any) -> None:
    """Volcano and the scheduler hold back only pods that ask for it; Kueue can hold back all."""
    group, pods = render(policy, Gang(role, 0, 1))
    assert group is None
    assert not {"kueue.x-k8s.io/queue-name", "sluice.dev/pod-group"} & set(
        pods[0]["metadata"]["labels"]
    )
    assert not {"schedulerName", "schedulingGroup"} & set(pods[0]["spec"])


def test_no_template_moves_a_pod_out_of_its_group() -> None:
    """Kueue refuses a group with two queue names, as earlier documentation advised for services."""
    labels = {"kueue.x-k8s.io/queue-name": "services", "team": "a"}
    overrides = [{"roles": ["buffer"], "template": {"metadata": {"labels": labels}}}]
    job = make_job(podGroupPolicy=KUEUE, podTemplateOverrides=overrides)
    gang = Gang("buffer", 0, 1)
    group = group_of(job, gang, 1, SHARED)
    (pod,) = gang_pods(job, gang, 1, "10.0.0.1:7700", Images(), group)
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert pod["metadata"]["labels"]["team"] == "a"


def test_volcano_gets_one_pod_group_for_the_job() -> None:
    policy = {"volcano": {"queue": "team-a", "priorityClassName": "high"}}
    group = whole(policy)
    assert group is not None
    assert (group["apiVersion"], group["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
    assert group["metadata"]["name"] == "demo-group-1234-5"
    spec = group["spec"]
    assert (spec["minMember"], spec["queue"], spec["priorityClassName"]) == (4, "team-a", "high")
    assert spec["minResources"]["nvidia.com/gpu"] == "18", "of trainer and engines"
    for gang in (TRAINER, Gang("rollout", 1, 1)):
        for pod in render(policy, gang)[1]:
            assert pod["spec"]["schedulerName"] == "volcano"
            assert (
                pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"]
                == "demo-group-1234-5"
            )


def test_kubernetes_own_gangs() -> None:
    group = whole({"native": {}})
    assert group is not None
    assert group["apiVersion"] == "scheduling.k8s.io/v1beta1"
    assert group["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 4}},
        "disruptionMode": {"all": {}},
    }
    V1beta1PodGroup.model_validate(
        group
    )  # of Kubernetes 1.37; refuses fields that it does not know
    for gang in (TRAINER, Gang("rollout", 1, 1)):
        for pod in render({"native": {}}, gang)[1]:
            assert pod["spec"]["schedulingGroup"] == {"podGroupName": "demo-group-1234-5"}
            V1PodSchedulingGroup.model_validate(pod["spec"]["schedulingGroup"])


@pytest.mark.parametrize("policy", [{"volcano": {}}, {"native": {}}], ids=str)
def test_the_group_of_a_further_engine_is_of_its_pods_alone(policy: dict[str, Any]) -> None:
    group, pods = render(policy, ENGINE)
    assert group is not None
    manifest = group_object(make_job(podGroupPolicy=policy), group, pods)
    assert manifest is not None
    assert manifest["metadata"]["name"] == "demo-rollout-3-2"
    gang = manifest["spec"].get("schedulingPolicy", {}).get("gang", {})
    assert manifest["spec"].get("minMember", gang.get("minCount")) == 1


def test_a_group_has_the_priority_of_its_trainer() -> None:
    overrides = [{"roles": ["trainer"], "template": {"spec": {"priorityClassName": "low"}}}]
    job = make_job(podGroupPolicy={"native": {}}, podTemplateOverrides=overrides)
    objects = [item for item in render_all(job) if item["kind"] == "PodGroup"]
    assert [stored["spec"]["priorityClassName"] for stored in objects] == ["low"]


def test_groups_are_labelled_and_owned_like_their_pods() -> None:
    group, (_, pods) = whole({"volcano": {}}), render({"volcano": {}}, TRAINER)
    assert group is not None
    assert group["metadata"]["ownerReferences"] == pods[0]["metadata"]["ownerReferences"]
    assert group["metadata"]["labels"].items() <= pods[0]["metadata"]["labels"].items()


def test_resources_are_summed_over_containers_and_pods() -> None:
    first = {
        "requests": {"cpu": "500m", "memory": "1Gi"},
        "limits": {"cpu": "2", "nvidia.com/gpu": 4},
    }
    second = {"limits": {"cpu": "250m"}}
    pod = {"spec": {"containers": [{"resources": first}, {"resources": second}, {}]}}
    assert requests([pod, pod]) == {"cpu": "1500m", "memory": str(2 * 2**30), "nvidia.com/gpu": "8"}
