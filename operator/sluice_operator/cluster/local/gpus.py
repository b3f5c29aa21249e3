"""Assignment of this machine's GPUs to pods, as a scheduler would do it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import KubeObject


def visible_gpus() -> list[str]:
    """Return CUDA_VISIBLE_DEVICES if it is set, and all devices of the driver otherwise."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return [str(number) for number in sorted(int(name) for name in numbers if name.isdigit())]


def requested(container: Mapping[str, Any]) -> int:
    """Return the number of GPUs that a container requests."""
    return int(container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))


def required_by(objects: Sequence[KubeObject]) -> int:
    """Return the number of GPUs that a job needs to start.

    These are the GPUs of the first gang of each role, and those of claims, which gangs share.
    """
    pods = [
        manifest
        for manifest in objects
        if manifest["kind"] == "Pod" and manifest["metadata"]["labels"][names.LABEL_REPLICA] == "0"
    ]
    claims = [manifest for manifest in objects if manifest["kind"] == "ResourceClaim"]
    by_pods = sum(requested(container) for pod in pods for container in pod["spec"]["containers"])
    return by_pods + sum(map(claimed_by, claims))


def claimed_by(claim: Mapping[str, Any]) -> int:
    """Return the number of GPUs that a ResourceClaim requests."""
    requests = claim["spec"]["devices"]["requests"]
    return sum(request["exactly"].get("count", 1) for request in requests)


def assign(count: int, all_gpus: Sequence[str], taken: Sequence[str]) -> list[str] | str:
    """Return `count` GPUs for a pod, or why there are none.

    A GPU that is listed twice in `all_gpus` may be taken twice.
    """
    free = list(all_gpus)
    for name in taken:
        free.remove(name)
    if count > len(free):
        return f"{count} GPUs requested, {len(free)} of {len(all_gpus)} free"
    return free[:count]


def allocate(
    claim: Mapping[str, Any], all_gpus: Sequence[str], taken: Sequence[str]
) -> dict[str, list[str]] | str:
    """Return GPUs for each request of a ResourceClaim, or why there are none."""
    requests = claim["spec"]["devices"]["requests"]
    assigned = assign(claimed_by(claim), all_gpus, taken)
    if isinstance(assigned, str):
        return assigned
    left = iter(assigned)
    return {
        request["name"]: [next(left) for _ in range(request["exactly"].get("count", 1))]
        for request in requests
    }


def claim_names(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of ResourceClaims, by the names that the pod's containers use for them."""
    claims = pod["spec"].get("resourceClaims", [])
    return {claim["name"]: claim["resourceClaimName"] for claim in claims}


def claimed(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    allocated: Mapping[str, dict[str, list[str]]],
) -> list[str]:
    """Return the GPUs of a container's claims: of the request that it names, or of all requests."""
    gpu_names: list[str] = []
    for claim in container.get("resources", {}).get("claims", []):
        requests = allocated[claim_names(pod)[claim["name"]]]
        chosen = [claim["request"]] if "request" in claim else list(requests)
        gpu_names += [name for request in chosen for name in requests[request]]
    return gpu_names
