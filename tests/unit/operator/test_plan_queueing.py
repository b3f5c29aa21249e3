"""What Kueue, Volcano and Kubernetes' own gang scheduling are told, as their documentation wants it."""

from typing import Any

import pytest
from kubernetes.client.models.v1_pod_scheduling_group import V1PodSchedulingGroup
from kubernetes.client.models.v1beta1_pod_group import V1beta1PodGroup
from world import make_job

from sluice_operator.plan import KubeObject
from sluice_operator.plan.model import Gang, Images
from sluice_operator.plan.pods import gang_pods
from sluice_operator.plan.queueing import group_object, requests

TRAINER, ENGINE = Gang("trainer", 0, 2), Gang("rollout", 3, 1)


def render(policy: dict[str, Any], gang: Gang, attempt: int = 2) -> tuple[KubeObject | None, list[KubeObject]]:
    job = make_job(podGroupPolicy=policy, trainer={"nodes": 2, "gpusPerNode": 8})
    pods = gang_pods(job, gang, attempt, range(gang.size), "10.0.0.1:7700", Images())
    return group_object(job, gang, attempt, pods), pods


def test_kueue_gets_one_group_for_each_attempt_of_a_gang() -> None:
    group, pods = render({"kueue": {"queueName": "team-a", "priorityClass": "high"}}, TRAINER)
    assert group is None
    for index, pod in enumerate(pods):
        labels = {key: value for key, value in pod["metadata"]["labels"].items() if key.startswith("kueue")}
        assert labels == {
            "kueue.x-k8s.io/queue-name": "team-a",
            "kueue.x-k8s.io/priority-class": "high",
            "kueue.x-k8s.io/pod-group-name": "demo-trainer-0-2",
            "kueue.x-k8s.io/pod-group-pod-index": str(index),
        }
        annotations = {key: value for key, value in pod["metadata"]["annotations"].items() if key.startswith("kueue")}
        assert annotations == {
            "kueue.x-k8s.io/pod-group-total-count": "2",
            "kueue.x-k8s.io/retriable-in-group": "false",
        }
        assert "schedulingGates" not in pod["spec"], "the gate is Kueue's to set"


def test_each_engine_is_a_group_of_its_own() -> None:
    _, pods = render({"kueue": {"queueName": "q"}}, ENGINE, attempt=7)
    assert pods[0]["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "demo-rollout-3-7"


@pytest.mark.parametrize("policy", [{"kueue": {"queueName": "q"}}, {"volcano": {}}, {"native": {}}])
@pytest.mark.parametrize("role", ["buffer", "rendezvous"])
def test_services_do_not_queue(policy: dict[str, Any], role: Any) -> None:
    group, pods = render(policy, Gang(role, 0, 1))
    assert group is None
    assert "kueue.x-k8s.io/queue-name" not in pods[0]["metadata"]["labels"]
    assert not {"schedulerName", "schedulingGroup"} & set(pods[0]["spec"])


def test_volcano_gets_a_pod_group() -> None:
    group, pods = render({"volcano": {"queue": "team-a", "priorityClassName": "high"}}, TRAINER)
    assert group is not None
    assert (group["apiVersion"], group["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
    assert group["metadata"]["name"] == "demo-trainer-0-2"
    assert group["spec"] == {
        "minMember": 2,
        "minResources": {"cpu": "32", "memory": str(128 << 30), "nvidia.com/gpu": "16"},
        "queue": "team-a",
        "priorityClassName": "high",
    }
    for pod in pods:
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "demo-trainer-0-2"


def test_kubernetes_own_gangs() -> None:
    group, pods = render({"native": {}}, TRAINER)
    assert group is not None
    assert group["apiVersion"] == "scheduling.k8s.io/v1beta1"
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}, "disruptionMode": {"all": {}}}
    V1beta1PodGroup.model_validate(group)  # of Kubernetes 1.37; refuses fields that it does not know
    for pod in pods:
        assert pod["spec"]["schedulingGroup"] == {"podGroupName": "demo-trainer-0-2"}
        V1PodSchedulingGroup.model_validate(pod["spec"]["schedulingGroup"])


def test_a_group_has_the_priority_of_its_pods() -> None:
    overrides = [{"roles": ["trainer"], "template": {"spec": {"priorityClassName": "low"}}}]
    job = make_job(podGroupPolicy={"native": {}}, podTemplateOverrides=overrides)
    gang = Gang("trainer", 0, 1)
    group = group_object(job, gang, 1, gang_pods(job, gang, 1, [0], "10.0.0.1:7700", Images()))
    assert group is not None
    assert group["spec"]["priorityClassName"] == "low"


def test_groups_are_labelled_and_owned_like_their_pods() -> None:
    group, pods = render({"volcano": {}}, TRAINER)
    assert group is not None
    assert group["metadata"]["ownerReferences"] == pods[0]["metadata"]["ownerReferences"]
    assert group["metadata"]["labels"].items() <= pods[0]["metadata"]["labels"].items()


def test_resources_are_summed_over_containers_and_pods() -> None:
    first = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "2", "nvidia.com/gpu": 4}}
    second = {"limits": {"cpu": "250m"}}
    pod = {"spec": {"containers": [{"resources": first}, {"resources": second}, {}]}}
    assert requests([pod, pod]) == {"cpu": "1500m", "memory": str(2 * 2**30), "nvidia.com/gpu": "8"}
