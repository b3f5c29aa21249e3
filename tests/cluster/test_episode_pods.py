"""Pods of episodes at a real API server: accepted, replaced one after another, and reaped."""

from __future__ import annotations

import asyncio
from typing import Any

from sluice_operator.cluster.kube.paths import collection
from sluice_operator.plan.facts import names
from tests.cluster.operators import Operator
from tests.cluster.test_pod_security import enforce
from tests.cluster.world import OWNED, Object, World
from tests.pod_security import violations

PODS, VERIFIERS, EPISODES = 16, 4, 300
KINDS = (*OWNED, "Lease", "NetworkPolicy", "Event")
ENVIRONMENT: dict[str, Any] = {
    "command": ["agent"],
    "image": "me/agent:1",
    "pods": PODS,
    "verifier": {"command": ["judge"], "pods": VERIFIERS},
}
ROLLOUT: dict[str, Any] = {"gpusPerReplica": 0, "replicas": 1, "environment": ENVIRONMENT}
GANGS = 4


async def at_work(world: World) -> None:
    """A job whose engine runs at an address, as a kubelet says, and whose pool is there."""
    await world.running(GANGS, rollout=ROLLOUT)
    (leader,) = (await world.pods("rollout")).values()
    await world.set_status(leader, podIP="10.0.0.7", podIPs=[{"ip": "10.0.0.7"}])
    await world.until_pods(PODS, "episode")
    await world.until_pods(VERIFIERS, "verifier")


async def end_all(world: World) -> set[str]:
    """Say of all pods of episodes and verifiers that wait that they have ended; their names."""
    waiting = {
        name: pod
        for name, pod in (await world.pods()).items()
        if pod["metadata"]["labels"]["sluice.dev/role"] in names.EPISODES
        and pod["status"].get("phase") == "Pending"
    }
    ends = (world.end(pod, code=i % 2) for i, pod in enumerate(waiting.values()))
    await asyncio.gather(*ends)
    return {*waiting}


async def there(world: World) -> dict[str, int]:
    """Return the number of objects of each kind."""
    counts: dict[str, int] = {}
    for kind in KINDS:
        counts[kind] = len((await world.api.get(collection(kind, world.namespace)))["items"])
    return counts


async def test_episodes_come_and_go_and_leave_nothing(operator: Operator, world: World) -> None:
    """benchmarks/episodes.py has ten thousand of them."""
    await at_work(world)
    before, over = await there(world), set[str]()

    async def all_have_played() -> bool:
        over.update(await end_all(world))
        return len(over) >= EPISODES

    await world.until(all_have_played, 240)
    status = await world.status()
    assert (status["state"], status["restarts"]) == ("Starting", 0), "half of them have failed"

    async def replaced() -> bool:
        """The last that ended are gone too, and not only as many pods there as at first."""
        return not over & {*await world.names()} and len(await world.names()) == before["Pod"]

    await world.until(replaced)
    assert await there(world) == before
    await world.delete()
    await world.until_pods(0, "episode")
    await world.until_pods(0, "verifier")


async def test_their_engine_takes_them_with_it(operator: Operator, world: World) -> None:
    await at_work(world)
    before = [*await world.names("episode"), *await world.names("verifier")]
    (leader,) = await world.names("rollout")
    await world.finish(leader, code=1, container="worker")

    async def all_gone() -> bool:
        return not {*before} & {*await world.names()}

    await world.until(all_gone)


async def test_a_restricted_namespace_takes_them(operator: Operator, world: World) -> None:
    await enforce(world, "restricted")
    await at_work(world)
    for role in ("episode", "verifier"):
        for pod in (await world.pods(role)).values():
            assert violations(pod, "restricted") == []


async def test_a_job_keeps_them_from_each_other_and_from_its_own(
    operator: Operator, world: World
) -> None:
    await at_work(world)
    policies: list[Object] = (await world.api.get(collection("NetworkPolicy", world.namespace)))[
        "items"
    ]
    by_name = {policy["metadata"]["name"]: policy["spec"] for policy in policies}
    assert by_name["demo-episodes"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in by_name["demo-episodes"]
    assert by_name["demo-verifiers"]["policyTypes"] == ["Ingress", "Egress"]
    members = by_name["demo-ingress"]["ingress"][0]["from"][0]["podSelector"]
    assert members["matchExpressions"][0]["operator"] == "NotIn"
