"""Namespaces that enforce a Pod Security Standard (since Kubernetes 1.23).

On an older API server the label has no effect. There the tests compare the stored pods with the
standard in tests/pod_security.py, and say so.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.paths import collection, path
from tests.cluster.operators import Operator
from tests.cluster.world import World
from tests.pod_security import Level, violations

ON_GPUS: dict[str, Any] = {
    "rollout": {"gpusPerReplica": 1, "replicas": 1},
    "trainer": {"steps": 1, "gpusPerNode": 1},
}


async def enforce(world: World, level: Level) -> bool:
    """Label the world's namespace. Return True if the API server then refuses a bad pod."""
    labels = {
        "pod-security.kubernetes.io/enforce": level,
        "pod-security.kubernetes.io/enforce-version": "latest",
    }
    await world.api.merge(f"/api/v1/namespaces/{world.namespace}", {"metadata": {"labels": labels}})
    containers = [{"name": "probe", "image": "none"}]
    spec = {"containers": containers, "hostPID": True, "automountServiceAccountToken": False}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}

    async def accepted() -> bool:
        try:
            await world.api.create(collection("Pod", world.namespace), pod)
        except errors.UnavailableError:  # a new namespace's account is not there yet
            return False
        return True

    try:
        await world.until(accepted)
    except errors.ForbiddenError:
        return True
    await world.api.delete(path("Pod", world.namespace, "probe"), {"gracePeriodSeconds": 0})
    warnings.warn(
        f"this API server does not enforce {level}: only its stored pods are checked", stacklevel=2
    )
    return False


@pytest.mark.parametrize(
    ("level", "spec", "count"),
    [
        pytest.param("restricted", {}, 5, id="restricted, without GPUs"),
        pytest.param("baseline", ON_GPUS, 4, id="baseline, with SGLang's image on GPUs"),
    ],
)
async def test_a_job_runs_where_a_standard_is_enforced(
    operator: Operator, world: World, level: Level, spec: dict[str, Any], count: int
) -> None:
    await enforce(world, level)
    await world.create(**spec)
    await world.until_pods(count)
    for pod in (await world.pods()).values():
        assert violations(pod, level) == []


async def test_what_a_standard_refuses_reaches_the_user(operator: Operator, world: World) -> None:
    """A job on GPUs in a restricted namespace."""
    enforced = await enforce(world, "restricted")
    await world.create(**ON_GPUS)
    if enforced:
        await world.until(lambda: is_reported(world, "ApplyFailed"))
        assert await world.names("rollout") == []
    else:
        await world.until_pods(1, "rollout")
        assert all(violations(pod, "restricted") for pod in (await world.pods("rollout")).values())


async def is_reported(world: World, reason: str) -> bool:
    return reason in await world.reasons()
