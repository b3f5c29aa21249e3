"""Where pods would like to be: together where tensors travel, apart where one machine should not
take all.

Without a word of the job's these are wishes: a cluster without zones, or with one free machine,
runs it all the same. How near the pods must be (racks, NVLink domains) differs from cluster to
cluster; a `topology` says it, for all pods that compute or for those of one gang. A queue of Kueue
decides itself where pods go, so it is told the level; elsewhere it is the pods' affinity.
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
STAY = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""For autoscalers that would move a pod to save a machine. A trainer's step and restart cost more
than that, as does an engine's cold start; and without buffer or rendezvous all others wait."""
_GPU_ROLES = ("trainer", "rollout")
_BY_DEFAULT = Topology(preferred=ZONE)
_KUEUE = "kueue.x-k8s.io/podset-{}-topology"


def metadata(job: RLJob, gang: Gang) -> dict[str, Any]:
    """Part of a pod's metadata."""
    return {"annotations": STAY | _of_kueue(job, gang)}


def placement(job: RLJob, gang: Gang) -> dict[str, Any]:
    """Part of a pod's spec. Trainer and engines want one zone: NCCL and weights across zones are
    slow, and billed.
    """
    if gang.role not in _GPU_ROLES:
        return {}
    fields: dict[str, Any] = {"affinity": {"podAffinity": _affinity(job, gang)}}
    if gang.role == "rollout" and not resource_claims.shared(job):
        fields["topologySpreadConstraints"] = [_spread(job)]
    return fields


def _of_kueue(job: RLJob, gang: Gang) -> dict[str, str]:
    """The level, for the topology-aware scheduling of Kueue. It has one for each pod: the gang's
    goes first.
    """
    topology = _of_gang(job, gang) or job.spec.topology
    if topology is None or gang.role not in _GPU_ROLES or not _in_kueue(job):
        return {}
    kind, level = _level(topology)
    return {_KUEUE.format(kind): level}


def _affinity(job: RLJob, gang: Gang) -> dict[str, Any]:
    """Next to all pods that compute, and to those of the own gang.

    With Kueue only what nobody has said.
    """
    roles = {"key": names.LABEL_ROLE, "operator": "In", "values": list(_GPU_ROLES)}
    peers = {"matchLabels": names.selector(job), "matchExpressions": [roles]}
    members = {
        "matchLabels": names.selector(job, gang.role) | {names.LABEL_REPLICA: str(gang.replica)}
    }
    wanted: list[tuple[Topology | None, dict[str, Any]]] = [(_BY_DEFAULT, peers)]
    if not _in_kueue(job):
        wanted = [(job.spec.topology or _BY_DEFAULT, peers), (_of_gang(job, gang), members)]
    affinity: dict[str, Any] = {}
    for topology, selector in wanted:
        if topology is None:
            continue
        kind, level = _level(topology)
        term = {"topologyKey": level, "labelSelector": selector}
        entry = term if kind == "required" else {"weight": 100, "podAffinityTerm": term}
        affinity.setdefault(f"{kind}DuringSchedulingIgnoredDuringExecution", []).append(entry)
    return affinity


def _of_gang(job: RLJob, gang: Gang) -> Topology | None:
    """A single pod is always together with itself."""
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


def _spread(job: RLJob) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": HOST,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.selector(job, "rollout")},
    }
