"""Default requests and memory limits of containers, if neither the spec nor a template sets them.

A pod without requests is the first to be evicted from a node under pressure, counts as zero in a
queue, and is refused by a quota. So each of sluice's containers requests CPU and memory, little
enough for the smallest node that has the GPUs (4 CPUs and 16 GiB for one GPU).

Each container has a memory limit as well, so that a leak ends one container and not its node. The
limit is far above what a healthy container takes: a trainer's host memory peaks while it writes a
checkpoint, and a container that reaches its limit is killed. The buffer's limit equals its request,
because it adapts to its memory.
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
# Memory limits of the containers of an episode pod.
EPISODE_LIMITS = {names.EPISODE: "8Gi", names.VERIFIER: "8Gi", "sidecar": "1Gi"}
# The share of one GPU of a node with eight of them and 2 TiB.
_GPU_LIMIT_GIB = 256
_CPU_LIMIT_GIB = 32
# A worker with the job's function, its tools and the files that they hold.
_WORKER_LIMIT_GIB = 16
# Processes that judge, if the spec does not say how many: the most that a worker starts.
_JUDGES = 16
# One program of an episode in the worker's container: five times a Python with a client.
_PROGRAM_BYTES = 256 << 20
# A token of a sample under way, as Python holds its id, log-prob, mask and version.
_TOKEN_BYTES = 256
_PLUGIN_REQUESTS, _PLUGIN_LIMIT = {"cpu": "50m", "memory": "64Mi"}, "512Mi"
# Eight pieces of 32 MiB are fetched at a time, and the hub's client has buffers, too.
_FETCH_REQUESTS, _FETCH_LIMIT = {"cpu": "100m", "memory": "256Mi"}, "4Gi"
_MEMBER_MIB = 2  # memory of the rendezvous for each member


def of_spec(resources: Resources) -> dict[str, Any]:
    """Return the resources of a spec as part of a container."""
    return resources.model_dump(mode="json", exclude_defaults=True)


def with_default_resources(job: RLJob, container: Container) -> Container:
    """Return the container of a job with default requests and a memory limit.

    Containers that a template adds stay unchanged.
    """
    name = container["name"]
    return _with_defaults(container, _requests(job, name), _limit(job, name))


def with_pool_resources(gpus: int, container: Container) -> Container:
    """Return the container of a pool with default requests and a memory limit.

    gpus: those of an engine.
    """
    if container["name"] == "engine":
        return _with_defaults(container, _engine_requests(gpus), _engine_limit(gpus))
    if container["name"] == "plugin":
        return _with_defaults(container, _PLUGIN_REQUESTS, _PLUGIN_LIMIT)
    if container["name"] == "fetch":
        return _with_defaults(container, _FETCH_REQUESTS, _FETCH_LIMIT)
    return container


def _with_defaults(
    container: Container, default: Mapping[str, str], limit: str | None
) -> Container:
    """Return the container with these requests and this memory limit.

    A resource that has a request or a limit gets no default request.
    """
    resources = container.get("resources") or {}
    requests = resources.get("requests") or {}
    named = requests.keys() | (resources.get("limits") or {}).keys()
    missing = {name: amount for name, amount in default.items() if name not in named}
    if missing:
        container = container | {"resources": resources | {"requests": missing | requests}}
    return container if limit is None else with_memory_limit(container, limit)


def with_memory_limit(container: Container, default: str) -> Container:
    """Return the container with a memory limit.

    That is its own limit, else the default, or its memory request if that is larger.
    """
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    if "memory" in limits:
        return container
    request = str((resources.get("requests") or {}).get("memory", default))
    limit = max(default, request, key=quantity_value)
    return container | {"resources": resources | {"limits": limits | {"memory": limit}}}


def with_shared_memory_limit(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the pod's spec with a size for the volume of /dev/shm, unless a template set one.

    The size is half of the memory limit of the first container, which is the trainer or the engine.
    Half of the memory is what Linux gives a tmpfs by default.
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
        return _engine_requests(engine)
    if name == "worker":
        on_gpus = job.spec.on_gpu if job.spec.uses_pool else engine
        return {"cpu": "500m", "memory": "1Gi"} if on_gpus else {"cpu": "100m", "memory": "256Mi"}
    # A pod's request is the sum of its containers or the largest of its init containers. These init
    # containers request no more than the sum.
    return {
        "buffer": {"cpu": "100m"},
        "rows": {"cpu": "100m", "memory": str(job.spec.buffer.memory)},
        "plugin": _PLUGIN_REQUESTS,
        "fetch": _FETCH_REQUESTS,
        "rendezvous": {"cpu": "50m", "memory": "128Mi"},
        "openenv": {"cpu": "100m", "memory": "256Mi"},
    }.get(name, {})


def _engine_requests(gpus: int) -> dict[str, str]:
    return _gpu(gpus) if gpus else _cpu(1)


def _engine_limit(gpus: int) -> str:
    return f"{_GPU_LIMIT_GIB * gpus if gpus else _CPU_LIMIT_GIB}Gi"


def _gpu(count: int) -> dict[str, str]:
    return {"cpu": str(2 * count), "memory": f"{8 * count}Gi"}


def _cpu(processes: int) -> dict[str, str]:
    return {"cpu": f"{250 * processes}m", "memory": f"{processes}Gi"}


def _limit(job: RLJob, name: str) -> str | None:
    """Return the memory limit of one of sluice's containers; None for other containers."""
    trainer, engine = job.spec.trainer, job.spec.rollout.gpus_per_replica
    if name == "trainer":
        gpus = trainer.gpus_per_node
        return f"{_GPU_LIMIT_GIB * gpus if gpus else _CPU_LIMIT_GIB * trainer.processes}Gi"
    if name == "engine":
        return _engine_limit(engine)
    if name == "worker":
        return f"{_WORKER_LIMIT_GIB + math.ceil(_worker_bytes(job) / 2**30)}Gi"
    members = trainer.nodes * trainer.processes + job.spec.replicas
    return {
        "buffer": str(job.spec.buffer.memory),
        "rows": str(job.spec.buffer.memory),
        "plugin": _PLUGIN_LIMIT,
        "fetch": _FETCH_LIMIT,
        "rendezvous": f"{1024 + _MEMBER_MIB * members}Mi",
        "openenv": EPISODE_LIMITS[names.EPISODE],
    }.get(name)


def _worker_bytes(job: RLJob) -> float:
    """Return the memory that a worker's settings let it use.

    It consists of the processes that judge, the programs of episodes, and the samples under way.
    """
    rollout, evaluation = job.spec.rollout, job.spec.evaluation
    rewards = [
        job.spec.reward,
        *(dataset.reward for dataset in (evaluation.datasets if evaluation else [])),
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
