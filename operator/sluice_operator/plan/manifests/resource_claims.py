"""GPUs of containers. A trainer and engines that share them (trainer.colocate) claim them together.

Containers of two pods cannot have the same extended resource (`nvidia.com/gpu`). Kubernetes' way is
Dynamic Resource Allocation: each trainer pod has a ResourceClaim (resource.k8s.io/v1, Kubernetes
1.34) with one request for each engine that lives on its GPUs. The trainer's container uses the
whole claim, an engine's its own request, and since a claim is allocated on one node, all of them
run there. A LocalCluster allocates claims itself.

Not one request for each GPU: a container may name a claim once, and one request of it.
"""

from __future__ import annotations

from typing import Any

from sluice.api import RLJob
from sluice.api.groups.resources import GPU
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import Gang, KubeObject

KIND = "ResourceClaim"
_CLAIM = "gpus"
# The DeviceClass that NVIDIA's DRA driver installs.
_DEVICE_CLASS = "gpu.nvidia.com"


def shared(job: RLJob) -> bool:
    """True where trainer and engines share GPUs."""
    return job.spec.trainer.colocate and job.spec.on_gpu


def resource_claims(job: RLJob) -> list[KubeObject]:
    """One for each trainer pod; it stays while pods come and go."""
    if not shared(job):
        return []
    return [_claim(job, node) for node in range(job.spec.trainer.nodes)]


def _claim(job: RLJob, node: int) -> KubeObject:
    device = {
        "deviceClassName": _DEVICE_CLASS,
        "count": job.spec.rollout.gpus_per_replica,
    }
    requests = [
        {"name": _request(slot), "exactly": device} for slot in range(_engines_per_node(job))
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": KIND,
        "metadata": names.metadata(job, names.gpus_name(job, node)),
        "spec": {"devices": {"requests": requests}},
    }


def of_pod(job: RLJob, gang: Gang, index: int) -> dict[str, Any]:
    """Part of a pod's spec: the claim that its containers use."""
    if not shared(job) or gang.role not in ("trainer", "rollout"):
        return {}
    node = index if gang.role == "trainer" else gang.replica // _engines_per_node(job)
    return {"resourceClaims": [{"name": _CLAIM, "resourceClaimName": names.gpus_name(job, node)}]}


def gpus(job: RLJob, gang: Gang) -> dict[str, Any]:
    """Resources of the container that computes: its GPUs."""
    if shared(job):
        mine = (
            {"request": _request(gang.replica % _engines_per_node(job))}
            if gang.role == "rollout"
            else {}
        )
        return {"claims": [{"name": _CLAIM, **mine}]}
    count = (
        job.spec.trainer.gpus_per_node
        if gang.role == "trainer"
        else job.spec.rollout.gpus_per_replica
    )
    return {"limits": {GPU: count}} if count else {}


def _engines_per_node(job: RLJob) -> int:
    return job.spec.trainer.gpus_per_node // job.spec.rollout.gpus_per_replica


def _request(slot: int) -> str:
    return f"engine-{slot}"
