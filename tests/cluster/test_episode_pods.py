"""Pods of episodes at a real API server: accepted, replaced one after another, and reaped."""

from __future__ import annotations

from typing import Any

from sluice_operator.cluster.kube.paths import collection
from tests.cluster.operators import Operator
from tests.cluster.test_pod_security import enforce
from tests.cluster.world import Object, World
from tests.pod_security import violations

PODS, EPISODES = 3, 60
ENVIRONMENT: dict[str, Any] = {"command": ["agent"], "image": "me/agent:1", "pods": PODS}
ROLLOUT: dict[str, Any] = {"gpusPerReplica": 0, "replicas": 1, "environment": ENVIRONMENT}
GANGS = 4


async def at_work(world: World) -> None:
    """A job whose engine runs at an address, as a kubelet says, and whose pool is there."""
    await world.running(GANGS, rollout=ROLLOUT)
    (leader,) = (await world.pods("rollout")).values()
    await world.set_status(leader, podIP="10.0.0.7", podIPs=[{"ip": "10.0.0.7"}])
    await world.until_pods(PODS, "episode")


async def test_episodes_come_and_go_and_leave_nothing(operator: Operator, world: World) -> None:
    await at_work(world)
    over: set[str] = set()

    async def all_have_played() -> bool:
        for name, pod in (await world.pods("episode")).items():
            if pod["status"].get("phase") == "Pending":
                await world.run(name)
                await world.finish(name, code=len(over) % 2)
                over.add(name)
        return len(over) >= EPISODES

    await world.until(all_have_played, 120)
    status = await world.status()
    assert (status["state"], status["restarts"]) == ("Starting", 0), "half of them have failed"
    await world.delete()
    await world.until_pods(0, "episode")


async def test_their_engine_takes_them_with_it(operator: Operator, world: World) -> None:
    await at_work(world)
    before = await world.names("episode")
    (leader,) = await world.names("rollout")
    await world.finish(leader, code=1, container="worker")

    async def all_gone() -> bool:
        return not {*before} & {*await world.names("episode")}

    await world.until(all_gone)


async def test_a_restricted_namespace_takes_them(operator: Operator, world: World) -> None:
    await enforce(world, "restricted")
    await at_work(world)
    for pod in (await world.pods("episode")).values():
        assert violations(pod, "restricted") == []


async def test_a_job_keeps_them_from_each_other_and_from_its_own(
    operator: Operator, world: World
) -> None:
    await at_work(world)
    policies: list[Object] = (await world.api.get(collection("NetworkPolicy", world.namespace)))[
        "items"
    ]
    by_name = {each["metadata"]["name"]: each["spec"] for each in policies}
    assert by_name["demo-episodes"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in by_name["demo-episodes"]
    members = by_name["demo-ingress"]["ingress"][0]["from"][0]["podSelector"]
    assert members["matchExpressions"][0]["operator"] == "NotIn"
