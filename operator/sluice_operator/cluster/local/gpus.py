"""This machine's GPUs, handed out to pods as a scheduler would."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import KubeObject


def visible_gpus() -> list[str]:
    """CUDA_VISIBLE_DEVICES where it is set, else all devices of the driver."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return [str(number) for number in sorted(int(name) for name in numbers if name.isdigit())]


def requested(container: Mapping[str, Any]) -> int:
    """GPUs that a container asks for."""
    return int(container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))


def required_by(objects: Sequence[KubeObject]) -> int:
    """GPUs without which a job cannot begin: those of the first gang of each role, and of claims,
    which gangs share.
    """
    pods = [
        each
        for each in objects
        if each["kind"] == "Pod" and each["metadata"]["labels"][names.LABEL_REPLICA] == "0"
    ]
    of_pods = sum(requested(container) for pod in pods for container in pod["spec"]["containers"])
    return of_pods + sum(claimed_by(each) for each in objects if each["kind"] == "ResourceClaim")


def claimed_by(claim: Mapping[str, Any]) -> int:
    return sum(each["exactly"].get("count", 1) for each in claim["spec"]["devices"]["requests"])


def assign(wanted: int, all_gpus: Sequence[str], taken: Sequence[str]) -> list[str] | str:
    """GPUs for one pod, or why there are none.

    A name that stands twice in `all_gpus` may be taken twice.
    """
    free = list(all_gpus)
    for name in taken:
        free.remove(name)
    if wanted > len(free):
        return f"{wanted} GPUs wanted, {len(free)} of {len(all_gpus)} free"
    return free[:wanted]


def allocate(
    claim: Mapping[str, Any], all_gpus: Sequence[str], taken: Sequence[str]
) -> dict[str, list[str]] | str:
    """GPUs for each request of a ResourceClaim, or why there are none."""
    requests = claim["spec"]["devices"]["requests"]
    assigned = assign(claimed_by(claim), all_gpus, taken)
    if isinstance(assigned, str):
        return assigned
    left = iter(assigned)
    return {
        each["name"]: [next(left) for _ in range(each["exactly"].get("count", 1))]
        for each in requests
    }


def claim_names(pod: Mapping[str, Any]) -> dict[str, str]:
    """The pod's own names of ResourceClaims -> theirs."""
    return {
        each["name"]: each["resourceClaimName"] for each in pod["spec"].get("resourceClaims", [])
    }


def claimed(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    allocated: Mapping[str, dict[str, list[str]]],
) -> list[str]:
    """GPUs of a container's claims: those of the request that it names, else all of the claim."""
    gpu_names: list[str] = []
    for each in container.get("resources", {}).get("claims", []):
        requests = allocated[claim_names(pod)[each["name"]]]
        chosen = [each["request"]] if "request" in each else list(requests)
        gpu_names += [name for request in chosen for name in requests[request]]
    return gpu_names
