"""Gang admission by what the cluster has: Kueue, Volcano, or Kubernetes' own PodGroups. We schedule nothing ourselves.

One group for each attempt of a gang, named after it, so that groups of two attempts are never mixed. Trainer and
engines queue; buffer and rendezvous do not: they are small, hold no GPU, and must be there before the others can start.

Names and rules are those of the projects' documentation:
Kueue, "Run Plain Pods" (kueue.sigs.k8s.io/docs/tasks/run/plain_pods) and its pod integration's constants;
Volcano, PodGroup of scheduling.volcano.sh/v1beta1; Kubernetes 1.37, PodGroup of scheduling.k8s.io/v1beta1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.api import RLJob
from sluice.api.base import quantity_value
from sluice_operator.plan import names
from sluice_operator.plan.model import Gang, KubeObject

KIND = "PodGroup"
VOLCANO = "scheduling.volcano.sh/v1beta1"
NATIVE = "scheduling.k8s.io/v1beta1"
_QUEUED = ("trainer", "rollout")
_KUEUE = "kueue.x-k8s.io"


def queues(job: RLJob, role: str) -> bool:
    """Whether pods of this role wait for a queue, or a scheduler of gangs."""
    return job.spec.pod_group_policy is not None and role in _QUEUED


def group_version(job: RLJob) -> str | None:
    """The apiVersion of the job's PodGroups; None: it has none."""
    policy = job.spec.pod_group_policy
    if policy is None or policy.kueue is not None:
        return None
    return VOLCANO if policy.volcano is not None else NATIVE


def marks(job: RLJob, gang: Gang, attempt: int, index: int) -> dict[str, Any]:
    """Part of a pod: what tells the queue which group the pod belongs to."""
    policy = job.spec.pod_group_policy
    if policy is None or not queues(job, gang.role):
        return {}
    group = names.group_name(job, gang.role, gang.replica, attempt)
    if policy.kueue is not None:
        labels = {
            f"{_KUEUE}/queue-name": policy.kueue.queue_name,
            f"{_KUEUE}/pod-group-name": group,
            f"{_KUEUE}/pod-group-pod-index": str(index),
        }
        if policy.kueue.priority_class is not None:
            labels[f"{_KUEUE}/priority-class"] = policy.kueue.priority_class
        # Kueue then gives back the quota of a group whose pods have ended, and lets them go: we never mend a group,
        # we make a new one.
        annotations = {f"{_KUEUE}/pod-group-total-count": str(gang.size), f"{_KUEUE}/retriable-in-group": "false"}
        return {"metadata": {"labels": labels, "annotations": annotations}}
    if policy.volcano is not None:
        annotations = {"scheduling.k8s.io/group-name": group}
        return {"metadata": {"annotations": annotations}, "spec": {"schedulerName": "volcano"}}
    return {"spec": {"schedulingGroup": {"podGroupName": group}}}


def group_object(job: RLJob, gang: Gang, attempt: int, pods: Sequence[KubeObject]) -> KubeObject | None:
    """The PodGroup of a gang's attempt; None: pods need none. pods: all of the gang's."""
    policy, version = job.spec.pod_group_policy, group_version(job)
    if policy is None or version is None or not queues(job, gang.role):
        return None
    labels = {
        **names.selector(job, gang.role),
        names.LABEL_REPLICA: str(gang.replica),
        names.LABEL_ATTEMPT: str(attempt),
    }
    metadata = names.metadata(job, names.group_name(job, gang.role, gang.replica, attempt), labels)
    priority = pods[0]["spec"].get("priorityClassName")
    if policy.volcano is not None:
        spec: dict[str, Any] = {"minMember": gang.size, "minResources": requests(pods)}
        if policy.volcano.queue is not None:
            spec["queue"] = policy.volcano.queue
        priority = policy.volcano.priority_class_name or priority
    else:
        spec = {"schedulingPolicy": {"gang": {"minCount": gang.size}}, "disruptionMode": {"all": {}}}
    if priority is not None:
        spec["priorityClassName"] = priority
    return {"apiVersion": version, "kind": KIND, "metadata": metadata, "spec": spec}


def requests(pods: Sequence[KubeObject]) -> dict[str, str]:
    """What the pods' containers request in all; a limit without a request is one, as it is for Kubernetes."""
    total: dict[str, float] = {}
    for pod in pods:
        for container in pod["spec"]["containers"]:
            resources = container.get("resources") or {}
            wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
            for name, quantity in wanted.items():
                total[name] = total.get(name, 0.0) + quantity_value(str(quantity))
    return {name: _quantity(value) for name, value in sorted(total.items())}


def _quantity(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{round(value * 1000)}m"
