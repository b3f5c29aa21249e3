"""Gang admission by what the cluster has: Kueue, Volcano, or Kubernetes' own PodGroups. We schedule
nothing ourselves.

A job is admitted as a whole: one group holds the trainer and the first `minReplicas` engines, and
replacements of their pods join it. Admitted apart, two jobs would each get half of what they need,
and wait for ever. Each further engine is a group of its own, one for each attempt: it is admitted
or not, to nobody's harm. With Kueue the group holds the buffer and the rendezvous too: a namespace
with a LocalQueue `default` queues every pod, and pods that no group holds are admitted apart.
Volcano and the scheduler queue only what asks for it, so services start there at once.

Names and rules are those of the projects' documentation: Kueue, "Run Plain Pods"
(kueue.sigs.k8s.io/docs/tasks/run/plain_pods) and its pod integration's constants; Volcano, PodGroup
of scheduling.volcano.sh/v1beta1; Kubernetes 1.37, PodGroup of scheduling.k8s.io/v1beta1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.api import PodGroupStatus, RLJob
from sluice.api.schema.base import quantity_value
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import Gang, KubeObject, PodGroup

KIND = "PodGroup"
VOLCANO = "scheduling.volcano.sh/v1beta1"
NATIVE = "scheduling.k8s.io/v1beta1"
_QUEUED = ("trainer", "rollout")
_SERVICES = ("buffer", "rendezvous")
_KUEUE = "kueue.x-k8s.io"


def queues(job: RLJob, role: str) -> bool:
    """True if pods of this role wait for a queue, or for a scheduler of gangs."""
    if role in _SERVICES:
        return holds_services(job)
    return job.spec.pod_group_policy is not None and role in _QUEUED


def holds_services(job: RLJob) -> bool:
    """True if the job's next group holds the buffer and the rendezvous too."""
    policy = job.spec.pod_group_policy
    return policy is not None and policy.kueue is not None


def group_version(job: RLJob) -> str | None:
    """The apiVersion of the job's PodGroups; None: it has none."""
    policy = job.spec.pod_group_policy
    if policy is None or policy.kueue is not None:
        return None
    return VOLCANO if policy.volcano is not None else NATIVE


def is_shared(gang: Gang, shared: PodGroupStatus) -> bool:
    """True if the gang is in the group that the job is admitted by."""
    if gang.role in _SERVICES:
        return shared.services
    return gang.role == "trainer" or (gang.role == "rollout" and gang.replica < shared.replicas)


def group_of(
    job: RLJob, gang: Gang, attempt: int, shared: PodGroupStatus | None
) -> PodGroup | None:
    """The group that a gang's pods belong to; None: they do not queue. shared: that of the job."""
    if shared is None or not queues(job, gang.role):
        return None
    if not is_shared(gang, shared):
        if gang.role in _SERVICES:  # the group is one that an older release has made
            return None
        return PodGroup(
            names.attempt_name(job, gang.role, gang.replica, attempt), gang.size, alone=True
        )
    size = job.spec.trainer.nodes + shared.replicas * job.spec.rollout.nodes_per_replica
    size += len(_SERVICES) if shared.services else 0
    return PodGroup(names.group_name(job, shared.number), size)


def marks(
    job: RLJob, gang: Gang, index: int, group: PodGroup | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts of a pod's metadata and spec that tell the queue which group the pod belongs to."""
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
    """Labels and annotations.

    The role's hash is its name, so that a pod that replaces another is of its kind whatever an
    operator of another release adds to it, and people find `trainer` and `engine` in the Workload.
    """
    policy = job.spec.pod_group_policy
    assert policy is not None
    assert policy.kueue is not None
    kind, rank = _place(gang, index, group)
    labels |= {
        names.LABEL_QUEUE: policy.kueue.queue_name,
        f"{_KUEUE}/pod-group-name": group.name,
        f"{_KUEUE}/pod-group-pod-index": str(rank),
    }
    if policy.kueue.priority_class is not None:
        labels[f"{_KUEUE}/priority-class"] = policy.kueue.priority_class
    annotations = {f"{_KUEUE}/pod-group-total-count": str(group.size), f"{_KUEUE}/role-hash": kind}
    if group.alone:
        annotations[names.ENDS_GROUP] = "false"
    return {"labels": labels, "annotations": annotations}


def _place(gang: Gang, index: int, group: PodGroup) -> tuple[str, int]:
    """(kind, rank among the group's pods of this kind). An engine's first pod has the worker, the
    others have not.
    """
    if gang.role != "rollout":
        return gang.role, index
    before = 0 if group.alone else gang.replica
    return (
        ("engine", before)
        if index == 0
        else ("engine-follower", before * (gang.size - 1) + index - 1)
    )


def group_object(job: RLJob, group: PodGroup, pods: Sequence[KubeObject]) -> KubeObject | None:
    """The PodGroup; None: pods need none. pods: all of the group's, the trainer's first."""
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
    return {"apiVersion": version, "kind": KIND, "metadata": metadata, "spec": spec}


def requests(pods: Sequence[KubeObject]) -> dict[str, str]:
    """The sum of the containers' requests; a limit without a request is one,
    as it is for Kubernetes.
    """
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
