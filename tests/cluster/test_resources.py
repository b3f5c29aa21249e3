"""The pods' requests on a real API server: their class when a node is in need, and quotas."""

from __future__ import annotations

from sluice_operator.cluster.kube.paths import path
from tests.cluster.operators import Operator
from tests.cluster.world import Object, World

QUOTA = {"requests.cpu": "8", "requests.memory": "16Gi", "limits.memory": "1Ti"}


async def quota(world: World, hard: Object) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team"},
        "spec": {"hard": hard},
    }
    await world.api.create(f"/api/v1/namespaces/{world.namespace}/resourcequotas", body)


async def test_no_pod_is_the_first_to_be_evicted(operator: Operator, world: World) -> None:
    await world.create()
    await world.until_pods(5)
    classes = {name: pod["status"]["qosClass"] for name, pod in (await world.pods()).items()}
    assert set(classes.values()) == {"Burstable"}, classes


async def test_a_quota_that_wants_requests_and_limits_takes_the_pods(
    operator: Operator, world: World
) -> None:
    await quota(world, QUOTA)

    async def is_enforced() -> bool:
        current = await world.api.get(f"/api/v1/namespaces/{world.namespace}/resourcequotas/team")
        return bool((current.get("status") or {}).get("hard"))

    await world.until(is_enforced)
    await world.create()
    await world.until_pods(5)
    assert "ApplyFailed" not in await world.reasons()


async def test_the_spec_says_what_a_container_asks_for(operator: Operator, world: World) -> None:
    await world.create(
        trainer={"steps": 1, "gpusPerNode": 0, "resources": {"limits": {"memory": "3Gi"}}}
    )
    await world.until_pods(5)
    trainer = await world.api.get(path("Pod", world.namespace, "demo-trainer-0-1-0"))
    assert trainer["spec"]["containers"][0]["resources"] == {
        "limits": {"memory": "3Gi"},
        "requests": {"cpu": "250m", "memory": "3Gi"},
    }
