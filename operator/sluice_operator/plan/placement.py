"""Where pods would like to be: together where tensors travel, apart where one machine should not take all.

Wishes only: a cluster without zones, or with one free machine, runs the job all the same. Hard rules (racks, NVLink
domains) differ from cluster to cluster; they belong into a template, or to the queue (docs/concepts.md).
"""

from __future__ import annotations

from typing import Any

from sluice.api import RLJob
from sluice_operator.plan import claims, names
from sluice_operator.plan.model import Gang

ZONE = "topology.kubernetes.io/zone"
HOST = "kubernetes.io/hostname"
STAY = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""For autoscalers that would move a pod to save a machine: a step and a restart cost more than that."""
_STAYING = ("trainer", "buffer")
_GPU_ROLES = ("trainer", "rollout")


def metadata(role: str) -> dict[str, Any]:
    """Part of a pod's metadata."""
    return {"annotations": dict(STAY)} if role in _STAYING else {}


def placement(job: RLJob, gang: Gang) -> dict[str, Any]:
    """Part of a pod's spec. Trainer and engines want one zone: NCCL and weights across zones are slow, and billed."""
    if gang.role not in _GPU_ROLES:
        return {}
    roles = {"key": names.LABEL_ROLE, "operator": "In", "values": list(_GPU_ROLES)}
    peers = {"matchLabels": names.selector(job), "matchExpressions": [roles]}
    term = {"weight": 100, "podAffinityTerm": {"topologyKey": ZONE, "labelSelector": peers}}
    found: dict[str, Any] = {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}}
    if gang.role == "rollout" and not claims.shared(job):
        found["topologySpreadConstraints"] = [_spread(job)]
    return found


def _spread(job: RLJob) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": HOST,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.selector(job, "rollout")},
    }
