"""Requests of containers, where neither the spec nor a template says them.

A pod without any request is the first that a node in need evicts, counts nothing in a queue, and is
refused by a quota. So every container of ours has requests for CPU and memory, small enough for the
smallest node that has the GPUs (4 CPUs and 16 GiB for one). Only the buffer has a limit, which it
knows how to live with: more could harm nobody but itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.api import RLJob
from sluice.api.resources import Resources

Container = dict[str, Any]


def of_spec(resources: Resources) -> dict[str, Any]:
    """The spec's word, as part of a container."""
    return resources.model_dump(mode="json", exclude_defaults=True)


def with_requests(job: RLJob, container: Container) -> Container:
    """The container with requests for what it has neither a request nor a limit for; others'
    containers as they are.
    """
    resources = container.get("resources") or {}
    known = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    wanted = {
        name: amount
        for name, amount in _defaults(job, container["name"]).items()
        if name not in known
    }
    if not wanted:
        return container
    return container | {
        "resources": resources | {"requests": {**wanted, **(resources.get("requests") or {})}}
    }


def _defaults(job: RLJob, name: str) -> Mapping[str, str]:
    trainer, engine = job.spec.trainer, job.spec.rollout.gpus_per_replica
    if name == "trainer":
        return _gpu(trainer.gpus_per_node) if trainer.gpus_per_node else _cpu(trainer.processes)
    if name == "engine":
        return _gpu(engine) if engine else _cpu(1)
    if name == "worker":
        return {"cpu": "500m", "memory": "1Gi"} if engine else {"cpu": "100m", "memory": "256Mi"}
    # A pod asks for the most of its init containers or for all others together: these ask for no
    # more than the others.
    return {
        "buffer": {"cpu": "100m"},
        "rows": {"cpu": "100m", "memory": str(job.spec.buffer.memory)},
        "plugin": {"cpu": "50m", "memory": "64Mi"},
        "rendezvous": {"cpu": "50m", "memory": "128Mi"},
        "openenv": {"cpu": "100m", "memory": "256Mi"},
    }.get(name, {})


def _gpu(count: int) -> dict[str, str]:
    return {"cpu": str(2 * count), "memory": f"{8 * count}Gi"}


def _cpu(processes: int) -> dict[str, str]:
    return {"cpu": f"{250 * processes}m", "memory": f"{processes}Gi"}
