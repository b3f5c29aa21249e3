"""Operators that are killed or frozen at any moment.

No pod is created twice, no attempt is lost, and no restart is forgotten. Pods end with a delay, so
that a successor finds every mixture of what was done and what was not.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from functools import partial

import pytest

from sluice_operator.cluster.kube.paths import path
from tests.cluster.conftest import StartOperator
from tests.cluster.kubelet import Kubelet
from tests.cluster.operators import Operator
from tests.cluster.world import Object, World

SPEC: Object = {
    "rollout": {"replicas": 2, "gpusPerReplica": 0, "nodesPerReplica": 2},
    "trainer": {"nodes": 2, "steps": 10, "gpusPerNode": 0},
    "failurePolicy": {"maxRestarts": 1000, "rolloutBackoffSeconds": 1},
}
GANGS = ("rendezvous-0", "buffer-0", "rollout-0", "rollout-1", "trainer-0")
PODS = 8
SECONDS = 90.0


@pytest.mark.parametrize("seed", range(3))
async def test_operators_that_are_killed_at_random(
    start: StartOperator, world: World, seed: int
) -> None:
    """Each failure of a gang counts once, and exactly one attempt follows it."""
    chance = random.Random(seed)
    failed: Counter[str] = Counter()
    pair = [await start(SLUICE_IDENTITY=f"{seed}-{number}") for number in range(2)]
    async with Kubelet(world, chance).working() as kubelet:
        await world.create(**SPEC)
        for failures in range(1, 5):
            await world.until(lambda: all_run(world), SECONDS)
            failed[await fail_one(world, chance)] += 1
            await asyncio.sleep(chance.uniform(0, 1.5))
            victim = await leader(world, pair)
            victim.kill()
            pair.remove(victim)
            pair.append(await start(SLUICE_IDENTITY=f"{seed}-{failures + 1}"))
            await world.until(partial(restarted, world, failures), SECONDS)
        await world.until(lambda: all_run(world), SECONDS)
    assert kubelet.overlaps == set()
    assert {name: uids for name, uids in kubelet.lives.items() if len(uids) > 1} == {}
    assert await attempts(world) == attempts_after(failed)


async def test_a_leader_that_was_frozen_does_no_harm_when_it_wakes(
    start: StartOperator, world: World
) -> None:
    """It believes to lead still, and its successor has done the work meanwhile."""
    chance = random.Random(7)
    pair = [await start(SLUICE_IDENTITY=name) for name in ("first", "second")]
    async with Kubelet(world, chance).working() as kubelet:
        await world.create(**SPEC)
        await world.until(lambda: all_run(world), SECONDS)
        frozen = await leader(world, pair)
        other = next(item for item in pair if item is not frozen)
        frozen.process.send_signal(signal.SIGSTOP)
        failed = Counter([await fail_one(world, chance)])
        await world.until(lambda: leads(world, other), SECONDS)
        frozen.process.send_signal(signal.SIGCONT)
        await world.until(lambda: restarted(world, 1), SECONDS)
        await world.until(lambda: all_run(world), SECONDS)
        assert await asyncio.to_thread(frozen.process.wait, 30) == 1, (
            "a leader who lost the lease ends"
        )
    assert kubelet.overlaps == set()
    assert {name: uids for name, uids in kubelet.lives.items() if len(uids) > 1} == {}
    assert await attempts(world) == attempts_after(failed)


async def fail_one(world: World, chance: random.Random) -> str:
    """Let a container of some trainer or rollout pod die and return the name of its gang."""
    pods = await world.pods()
    victim = chance.choice(
        [name for name in sorted(pods) if "-trainer-" in name or "-rollout-" in name]
    )
    container = "" if "-trainer-" in victim else chance.choice(["engine", "worker"])
    await world.finish(victim, 1, "error: boom", container)
    _job, role, replica, _attempt, _node = victim.split("-")
    return f"{role}-{replica}"


async def all_run(world: World) -> bool:
    """Return True if exactly the desired pods exist and are ready."""
    status = await world.status()
    ready = sum(role["ready"] for role in status.get("roles", []))
    return ready == PODS and len(await world.names()) == PODS


async def restarted(world: World, count: int) -> bool:
    restarts = (await world.status()).get("restarts", 0)
    assert restarts <= count, "a failure was counted twice"
    return bool(restarts == count)


async def attempts(world: World) -> dict[str, int]:
    """Return the attempt that each gang is at."""
    return {
        f"{role['name']}-{gang['replica']}": gang["attempt"]
        for role in (await world.status())["roles"]
        for gang in role["gangs"]
    }


def attempts_after(failed: Counter[str]) -> dict[str, int]:
    """Return the attempt that each gang is at if one attempt followed each of its failures."""
    # A gang's own count of restarts would not do: an engine that ran for a while starts at 0 again.
    return {gang: 1 + failed[gang] for gang in GANGS}


async def leader(world: World, operators: list[Operator]) -> Operator:
    leaders: list[Operator] = []

    async def is_known() -> bool:
        leaders[:] = [operator for operator in operators if await leads(world, operator)]
        return bool(leaders)

    await world.until(is_known, SECONDS)
    return leaders[0]


async def leads(world: World, operator: Operator) -> bool:
    lease = await world.api.get(path("Lease", world.namespace, "sluice-operator"))
    return bool(lease["spec"]["holderIdentity"] == operator.identity)
