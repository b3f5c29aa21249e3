"""GPUs of containers, including GPUs that trainer and engines share (trainer.colocate).

Containers of two pods cannot share an extended resource (`nvidia.com/gpu`), so sharing uses Dynamic
Resource Allocation. Each trainer pod has a ResourceClaim (resource.k8s.io/v1, Kubernetes 1.34) with
one request for each engine on its GPUs. The trainer's container uses the whole claim, an engine's
container its request. A claim is allocated on one node, so all of them run there. A LocalCluster
allocates claims itself.

A request stands for all GPUs of an engine, because a container may name a claim only once, and only
one request of it.
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
    """Return True if trainer and engines share GPUs."""
    return job.spec.trainer.colocate and job.spec.on_gpu


def resource_claims(job: RLJob) -> list[KubeObject]:
    """Return a claim for each trainer pod; the claims stay while pods come and go."""
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
    """Return the part of a pod's spec that names the claim of its containers."""
    if not shared(job) or gang.role not in ("trainer", "rollout"):
        return {}
    node = index if gang.role == "trainer" else gang.replica // _engines_per_node(job)
    return {"resourceClaims": [{"name": _CLAIM, "resourceClaimName": names.gpus_name(job, node)}]}


def gpus(job: RLJob, gang: Gang) -> dict[str, Any]:
    """Return the GPUs of the container that computes, as its resources."""
    if shared(job):
        request = (
            {"request": _request(gang.replica % _engines_per_node(job))}
            if gang.role == "rollout"
            else {}
        )
        return {"claims": [{"name": _CLAIM, **request}]}
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
