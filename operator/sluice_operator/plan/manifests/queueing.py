"""Parts of pods, and objects, that tell a queue which pods to admit together.

`plan/decide/pod_groups.py` decides the groups. Names and rules are those of the projects'
documentation: Kueue, "Run Plain Pods" (kueue.sigs.k8s.io/docs/tasks/run/plain_pods) and the
constants of its pod integration; Volcano, PodGroup of scheduling.volcano.sh/v1beta1; Kubernetes
1.37, PodGroup of scheduling.k8s.io/v1beta1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sluice.api import RLJob
from sluice.api.schema.base import quantity_value
from sluice_operator.plan.decide.pod_groups import group_version
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import Gang, KubeObject, PodGroup

_KUEUE = "kueue.x-k8s.io"


def group_fields(
    job: RLJob, gang: Gang, index: int, group: PodGroup | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts of a pod's metadata and spec that name the group of the pod."""
    policy = job.spec.pod_group_policy
    if policy is None or group is None:
        return {}, {}
    labels = {names.LABEL_GROUP: group.name}
    if policy.kueue is not None:
        return _kueue(job, gang, index, group, labels), {}
    if policy.volcano is not None:
        annotations = {"scheduling.k8s.io/group-name": group.name}
        return {"labels": labels, "annotations": annotations}, {"schedulerName": "volcano"}
    return {"labels": labels}, {"schedulingGroup": {"podGroupName": group.name}}


def _kueue(
    job: RLJob, gang: Gang, index: int, group: PodGroup, labels: dict[str, str]
) -> dict[str, Any]:
    policy = job.spec.pod_group_policy
    assert policy is not None
    assert policy.kueue is not None
    kind, rank = _kind_and_rank(job, gang, index, group)
    labels |= {
        names.LABEL_QUEUE: policy.kueue.queue_name,
        f"{_KUEUE}/pod-group-name": group.name,
        f"{_KUEUE}/pod-group-pod-index": str(rank),
    }
    if policy.kueue.priority_class is not None:
        labels[f"{_KUEUE}/priority-class"] = policy.kueue.priority_class
    annotations = {
        f"{_KUEUE}/pod-group-total-count": str(group.size),
        # A name in place of a hash: a replacement pod stays of the same kind even if an operator of
        # another release adds fields to it, and people find `trainer` and `engine` in the Workload.
        f"{_KUEUE}/role-hash": kind,
    }
    if group.alone:
        annotations[names.ENDS_GROUP] = "false"
    return {"labels": labels, "annotations": annotations}


def _kind_and_rank(job: RLJob, gang: Gang, index: int, group: PodGroup) -> tuple[str, int]:
    """Return the pod's kind, and its rank among the pods of that kind in the group.

    The first pod of an engine differs from its other pods: it has the worker. With a pool there are
    workers alone.
    """
    if gang.role != "rollout":
        return gang.role, index
    before = 0 if group.alone else gang.replica
    if index == 0:
        return "worker" if job.spec.uses_pool else "engine", before
    return "engine-follower", before * (gang.size - 1) + index - 1


def group_objects(
    job: RLJob, groups: Mapping[Gang, PodGroup | None], pods: Mapping[Gang, Sequence[KubeObject]]
) -> list[KubeObject]:
    """Return the PodGroup objects of these groups; empty if the job's queue needs none.

    Parameters
    ----------
    job
        The job.
    groups
        The group of each gang; None for gangs that do not queue.
    pods
        All pods of each gang.

    """
    objects = []
    for group in dict.fromkeys(group for group in groups.values() if group is not None):
        members = sorted(
            (gang for gang in groups if groups[gang] == group),
            key=lambda gang: gang.role != "trainer",
        )
        manifest = group_object(job, group, [pod for gang in members for pod in pods[gang]])
        objects += [manifest] if manifest else []
    return objects


def group_object(job: RLJob, group: PodGroup, pods: Sequence[KubeObject]) -> KubeObject | None:
    """Return the PodGroup object of a group; None if the job's queue needs none.

    Parameters
    ----------
    job, group
        The group and its job.
    pods
        All pods of the group, the trainer's first.

    """
    policy, version = job.spec.pod_group_policy, group_version(job)
    if policy is None or version is None:
        return None
    metadata = names.metadata(
        job, group.name, names.selector(job) | {names.LABEL_GROUP: group.name}
    )
    priority = pods[0]["spec"].get("priorityClassName")
    if policy.volcano is not None:
        spec: dict[str, Any] = {"minMember": group.size, "minResources": requests(pods)}
        if policy.volcano.queue is not None:
            spec["queue"] = policy.volcano.queue
        priority = policy.volcano.priority_class_name or priority
    else:
        spec = {
            "schedulingPolicy": {"gang": {"minCount": group.size}},
            "disruptionMode": {"all": {}},
        }
    if priority is not None:
        spec["priorityClassName"] = priority
    return {"apiVersion": version, "kind": names.POD_GROUP, "metadata": metadata, "spec": spec}


def requests(pods: Sequence[KubeObject]) -> dict[str, str]:
    """Return the sum of the containers' requests, by resource.

    As in Kubernetes, a limit without a request counts as a request.
    """
    total: dict[str, float] = {}
    for pod in pods:
        for container in pod["spec"]["containers"]:
            resources = container.get("resources") or {}
            requested = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
            for name, quantity in requested.items():
                total[name] = total.get(name, 0.0) + quantity_value(str(quantity))
    return {name: _quantity(value) for name, value in sorted(total.items())}


def _quantity(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{round(value * 1000)}m"
