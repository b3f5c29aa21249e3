"""Placement of pods: close together if they exchange tensors, apart for resilience.

By default these are preferences, so a cluster without zones, or with one free node, runs the job as
well. How close pods must be (racks, NVLink domains) differs between clusters; a `topology` in the
spec says it, for all pods that compute or for one gang. In a queue of Kueue, Kueue decides about
placement and gets the topology level as an annotation. Otherwise it becomes pod affinity.
"""

from __future__ import annotations

from typing import Any

from sluice.api import RLJob
from sluice.api.groups.lifecycle import Topology
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import Gang
from sluice_operator.plan.manifests import resource_claims

ZONE = "topology.kubernetes.io/zone"
HOST = "kubernetes.io/hostname"
# Annotations for autoscalers that would move a pod to save a node. A lost step and a restart of the
# trainer, or a cold start of an engine, cost more; without buffer or rendezvous all others wait.
STAY = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
_GPU_ROLES = ("trainer", "rollout")
_BY_DEFAULT = Topology(preferred=ZONE)
_KUEUE_TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"


def metadata(job: RLJob, gang: Gang) -> dict[str, Any]:
    """Return the part of a pod's metadata that concerns its placement."""
    return {"annotations": STAY | _kueue_topology(job, gang)}


def placement(job: RLJob, gang: Gang) -> dict[str, Any]:
    """Return the part of a pod's spec that concerns its placement.

    Trainer and engines prefer one zone: NCCL and weight transfers across zones are slow and billed.
    """
    if gang.role not in _GPU_ROLES:
        return {}
    fields: dict[str, Any] = {"affinity": {"podAffinity": _affinity(job, gang)}}
    if gang.role == "rollout" and not resource_claims.shared(job):
        fields["topologySpreadConstraints"] = [spread(names.selector(job, "rollout"))]
    return fields


def _kueue_topology(job: RLJob, gang: Gang) -> dict[str, str]:
    """Return the level for Kueue's topology-aware scheduling.

    A pod can have one level, so the gang's topology goes before that of the job.
    """
    topology = _gang_topology(job, gang) or job.spec.topology
    if topology is None or gang.role not in _GPU_ROLES or not _in_kueue(job):
        return {}
    kind, level = _level(topology)
    return {_KUEUE_TOPOLOGY.format(kind): level}


def _affinity(job: RLJob, gang: Gang) -> dict[str, Any]:
    """Return the affinity to all pods that compute and to those of the same gang.

    With Kueue it is the default preference only, because Kueue gets the topologies of the spec.
    """
    roles = {"key": names.LABEL_ROLE, "operator": "In", "values": list(_GPU_ROLES)}
    peers = {"matchLabels": names.selector(job), "matchExpressions": [roles]}
    members = {
        "matchLabels": names.selector(job, gang.role) | {names.LABEL_REPLICA: str(gang.replica)}
    }
    targets: list[tuple[Topology | None, dict[str, Any]]] = [(_BY_DEFAULT, peers)]
    if not _in_kueue(job):
        targets = [(job.spec.topology or _BY_DEFAULT, peers), (_gang_topology(job, gang), members)]
    affinity: dict[str, Any] = {}
    for topology, selector in targets:
        if topology is None:
            continue
        kind, level = _level(topology)
        term = {"topologyKey": level, "labelSelector": selector}
        entry = term if kind == "required" else {"weight": 100, "podAffinityTerm": term}
        affinity.setdefault(f"{kind}DuringSchedulingIgnoredDuringExecution", []).append(entry)
    return affinity


def _gang_topology(job: RLJob, gang: Gang) -> Topology | None:
    """Return the topology of a gang with several pods; one pod needs none."""
    topology = {"trainer": job.spec.trainer.topology, "rollout": job.spec.rollout.topology}.get(
        gang.role
    )
    return topology if gang.size > 1 else None


def _level(topology: Topology) -> tuple[str, str]:
    return (
        ("required", topology.required)
        if topology.required
        else ("preferred", topology.preferred or "")
    )


def _in_kueue(job: RLJob) -> bool:
    return job.spec.pod_group_policy is not None and job.spec.pod_group_policy.kueue is not None


def spread(labels: dict[str, str]) -> dict[str, Any]:
    """Return the wish that pods with these labels are on different nodes."""
    return {
        "maxSkew": 1,
        "topologyKey": HOST,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
