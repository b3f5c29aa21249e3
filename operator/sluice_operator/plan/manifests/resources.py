"""Requests and memory limits of containers, if neither the spec nor a template has them.

A pod without any request is the first that a node in need evicts, counts nothing in a queue, and is
refused by a quota. So every container of ours has requests for CPU and memory, small enough for the
smallest node that has the GPUs (4 CPUs and 16 GiB for one).

Every container has a limit for memory too, so that a leak ends one container and not its node. It
is far above what a healthy container takes: a trainer's host memory peaks while it writes a
checkpoint, and a container that meets its limit is killed. Only the buffer's is its request, since
it knows how to live with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sluice.api import RLJob
from sluice.api.groups.resources import Resources
from sluice.api.schema.base import quantity_value
from sluice_operator.plan.facts import names

Container = dict[str, Any]
EPISODE_LIMITS = {names.EPISODE: "8Gi", names.VERIFIER: "8Gi", "sidecar": "1Gi"}
"""Container of an episode's pod -> its memory limit."""
# The share of one GPU of a node with eight of them and 2 TiB.
_GPU_LIMIT_GIB = 256
_CPU_LIMIT_GIB = 32
# A worker with a user's function, its tools and the files that they hold.
_WORKER_LIMIT_GIB = 16
# Processes that judge, if the spec does not say how many: the most that a worker starts.
_JUDGES = 16
# One program of an episode beside the worker: five times a Python with a client.
_PROGRAM_BYTES = 256 << 20
# A token of a sample under way, as Python holds its id, log-prob, mask and version.
_TOKEN_BYTES = 256
_MEMBER_MIB = 2


def of_spec(resources: Resources) -> dict[str, Any]:
    """The spec's word, as part of a container."""
    return resources.model_dump(mode="json", exclude_defaults=True)


def with_default_resources(job: RLJob, container: Container) -> Container:
    """The container with requests for what it has neither a request nor a limit for, and with a
    limit for memory; others' containers as they are.
    """
    resources = container.get("resources") or {}
    requests = resources.get("requests") or {}
    named = requests.keys() | (resources.get("limits") or {}).keys()
    missing = {
        name: amount
        for name, amount in _requests(job, container["name"]).items()
        if name not in named
    }
    if missing:
        container = container | {"resources": resources | {"requests": missing | requests}}
    limit = _limit(job, container["name"])
    return container if limit is None else with_memory_limit(container, limit)


def with_memory_limit(container: Container, default: str) -> Container:
    """The container with a limit for memory: its own, or the default, or its request if that is
    larger.
    """
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    if "memory" in limits:
        return container
    request = str((resources.get("requests") or {}).get("memory", default))
    limit = max(default, request, key=quantity_value)
    return container | {"resources": resources | {"limits": limits | {"memory": limit}}}


def with_shared_memory_limit(spec: dict[str, Any]) -> dict[str, Any]:
    """The pod's spec with a size for the volume of /dev/shm, if a template has not set one.

    Half of the memory limit of the first container, which is the trainer or the engine: as much of
    its memory as Linux gives to a tmpfs by itself.
    """
    memory = spec["containers"][0].get("resources", {}).get("limits", {}).get("memory")
    if memory is None:
        return spec
    size = f"{int(quantity_value(str(memory)) / 2) >> 20}Mi"
    volumes = [
        {**volume, "emptyDir": {"sizeLimit": size, **volume["emptyDir"]}}
        if volume["name"] == "dshm" and (volume.get("emptyDir") or {}).get("medium") == "Memory"
        else volume
        for volume in spec["volumes"]
    ]
    return spec | {"volumes": volumes}


def _requests(job: RLJob, name: str) -> Mapping[str, str]:
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


def _limit(job: RLJob, name: str) -> str | None:
    """The memory limit of a container of ours; None: it is somebody else's."""
    trainer, engine = job.spec.trainer, job.spec.rollout.gpus_per_replica
    if name == "trainer":
        gpus = trainer.gpus_per_node
        return f"{_GPU_LIMIT_GIB * gpus if gpus else _CPU_LIMIT_GIB * trainer.processes}Gi"
    if name == "engine":
        return f"{_GPU_LIMIT_GIB * engine if engine else _CPU_LIMIT_GIB}Gi"
    if name == "worker":
        return f"{_WORKER_LIMIT_GIB + math.ceil(_worker_bytes(job) / 2**30)}Gi"
    members = trainer.nodes * trainer.processes + job.spec.replicas
    return {
        "buffer": str(job.spec.buffer.memory),
        "rows": str(job.spec.buffer.memory),
        "plugin": "512Mi",
        "rendezvous": f"{1024 + _MEMBER_MIB * members}Mi",
        "openenv": EPISODE_LIMITS[names.EPISODE],
    }.get(name)


def _worker_bytes(job: RLJob) -> float:
    """Memory that the worker's settings let it take: processes that judge, programs of episodes,
    and samples under way.
    """
    rollout, evaluation = job.spec.rollout, job.spec.evaluation
    rewards = [
        job.spec.reward,
        *(each.reward for each in (evaluation.datasets if evaluation else [])),
    ]
    judges = sum(
        (reward.sandbox.processes or _JUDGES) * quantity_value(str(reward.sandbox.memory))
        for reward in rewards
        if reward is not None
    )
    runs_programs = rollout.environment is not None and not rollout.has_episode_pods
    programs = rollout.concurrency * _PROGRAM_BYTES if runs_programs else 0
    return (
        judges
        + programs
        + rollout.concurrency * (rollout.sampling.max_response_tokens * _TOKEN_BYTES)
    )
