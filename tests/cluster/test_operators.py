"""Operators that die, are two, or lose their API server."""

from __future__ import annotations

import asyncio
import signal

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys, new_key
from sluice_operator.cluster.kube.cluster import KubeCluster
from sluice_operator.cluster.kube.paths import path
from sluice_operator.spec_acceptance import accept
from tests.cluster.conftest import StartOperator
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operators import Operator
from tests.cluster.test_lifecycle import PODS
from tests.cluster.world import OWNED, World

LEASE = "sluice-operator"


async def holder(world: World) -> str:
    return str(
        (await world.api.get(path("Lease", world.namespace, LEASE)))["spec"]["holderIdentity"]
    )


async def children(world: World) -> dict[str, str]:
    """Name -> uid of all that the job owns."""
    objects = [stored for kind in OWNED for stored in await world.objects(kind)]
    return {f"{stored['metadata']['name']}": stored["metadata"]["uid"] for stored in objects}


@pytest.mark.parametrize("after", [0, 2, 4, 6])
async def test_an_operator_killed_at_any_point_of_a_pass_is_made_good(
    start: StartOperator, world: World, after: int
) -> None:
    """The operator is killed after some objects; its successor creates only the rest."""
    first = await start(SLUICE_IDENTITY="first")

    async def leads() -> bool:
        return first.metric("leader_election_master_status") == 1

    await world.until(leads)
    await world.create()
    while len(await children(world)) < after:
        await asyncio.sleep(0)
    first.kill()
    before = await children(world)
    await start(SLUICE_IDENTITY="second")
    await world.until_pods(5)
    await asyncio.sleep(1)
    assert await world.names() == PODS
    later = await children(world)
    assert {name: later.get(name) for name in before} == before, "what was made is kept"
    assert {
        gang["attempt"] for role in (await world.status())["roles"] for gang in role["gangs"]
    } == {1}


async def test_an_operator_killed_in_a_restart_loses_no_attempt(
    start: StartOperator, world: World
) -> None:
    """The next attempt's number is stored before anything is destroyed."""
    first = await start(SLUICE_IDENTITY="first")
    await world.running(6, trainer={"nodes": 2})
    await world.bind("demo-trainer-0-1-0", "demo-trainer-0-1-1")
    await world.finish("demo-trainer-0-1-1", 1, message="error: boom")
    while (await world.gang("trainer"))["attempt"] == 1:
        await asyncio.sleep(0)
    first.kill()
    await start(SLUICE_IDENTITY="second")

    async def is_deleted() -> bool:
        return bool(
            (await world.pods("trainer"))["demo-trainer-0-1-0"]["metadata"].get("deletionTimestamp")
        )

    await world.until(is_deleted)
    # The failed one, too: the API server marks a pod and then removes it, and leaves it marked
    # if the caller dies in between. Its kubelet ends it then.
    await world.gone("demo-trainer-0-1-0", "demo-trainer-0-1-1")
    await world.until(lambda: _trainer_is(world, "demo-trainer-0-2-0", "demo-trainer-0-2-1"))
    assert (await world.status())["restarts"] == 1


async def test_of_two_operators_one_works_and_the_other_takes_over(
    start: StartOperator, world: World
) -> None:
    first = await start(SLUICE_IDENTITY="first")

    async def leads() -> bool:
        return first.metric("leader_election_master_status") == 1

    await world.until(leads)
    second = await start(SLUICE_IDENTITY="second")
    await world.create()
    await world.until_pods(5)
    assert await holder(world) == "first"
    assert second.metric("controller_runtime_reconcile_total") == 0
    first.kill()
    await world.run()
    await world.finish("demo-trainer-0-1-0", 1, message="error: boom")
    await world.until(lambda: _trainer_is(world, "demo-trainer-0-2-0"))
    assert await holder(world) == "second"


async def test_an_operator_that_is_told_to_end_hands_over_at_once(
    start: StartOperator, world: World
) -> None:
    first = await start(SLUICE_IDENTITY="first", SLUICE_LEASE_SECONDS="30")

    async def is_held() -> bool:
        return first.metric("leader_election_master_status") == 1

    await world.until(is_held)
    await start(SLUICE_IDENTITY="second", SLUICE_LEASE_SECONDS="30")
    assert await asyncio.to_thread(first.end) == 0
    assert await holder(world) in ("", "second")

    async def is_taken() -> bool:
        return await holder(world) == "second"

    await world.until(is_taken, 10)


async def test_a_leader_who_cannot_renew_ends(start: StartOperator, world: World) -> None:
    """Somebody else holds the lease now: the old leader must not go on."""
    operator = await start(SLUICE_IDENTITY="old")

    async def leads() -> bool:
        return operator.metric("leader_election_master_status") == 1

    await world.until(leads)
    lease = path("Lease", world.namespace, LEASE)
    for _ in range(40):
        await world.api.merge(
            lease, {"spec": {"holderIdentity": "new", "renewTime": "2099-01-01T00:00:00.000000Z"}}
        )
        if operator.process.poll() is not None:
            break
        await asyncio.sleep(0.2)
    assert await asyncio.to_thread(operator.process.wait, 10) == 1


async def test_pods_that_the_watch_has_not_told_of_yet_are_not_lost(
    operator: Operator, world: World
) -> None:
    """A new leader may know a job's newest status and not yet its newest pods."""
    await world.running(5)
    fresh = KubeCluster(world.api, "fresh", JobKeys(new_key()), world.namespace)
    stored = await world.job()
    fresh.jobs.put(stored)
    assert fresh.pods_of(stored) == []
    observed = await fresh.observe(accept(stored, await fresh.config(stored)).job)
    assert sorted(pod["metadata"]["name"] for pod in observed.pods) == PODS


async def test_endpoints(operator: Operator, world: World) -> None:
    await world.running(5)
    assert operator.get("/healthz") == (200, "ok\n")
    assert operator.get("/readyz") == (200, "ok\n")
    text = operator.get("/metrics")[1]
    for name in (
        'workqueue_depth{name="rljob"} 0.0',
        'workqueue_unfinished_work_seconds{name="rljob"} 0.0',
        'controller_runtime_active_workers{controller="rljob"} 0.0',
        "process_resident_memory_bytes",
        'controller_runtime_reconcile_total{controller="rljob",result="requeue_after"}',
        "controller_runtime_reconcile_time_seconds_bucket",
        "workqueue_queue_duration_seconds_sum",
        f'rljob_info{{engine="sglang",name="demo",namespace="{world.namespace}"',
        'rljob_status_condition{condition="Running",name="demo",'
        f'namespace="{world.namespace}",status="False"}} 1.0',
    ):
        assert name in text
    assert operator.metric("controller_runtime_reconcile_errors_total") == 0


async def test_an_api_server_that_restarts_is_survived_and_what_vanished_meanwhile_is_noticed(
    plane: ControlPlane, start: StartOperator, world: World
) -> None:
    """A pod vanishes while the operator is stopped and its watches are broken.

    Only a comparison with the API server's lists can show it.
    """
    if plane.directory is None:
        pytest.skip("the API server of KUBECONFIG is not ours to restart")
    operator = await start(SLUICE_LEASE_SECONDS="30")
    await world.running(5)
    command = await plane.stop_api_server()
    await asyncio.sleep(2)  # the operator meets refused connections
    operator.process.send_signal(signal.SIGSTOP)
    plane.start_api_server(command)
    await world.until(lambda: _is_served(world), 30)
    await world.gone("demo-rollout-1-1-0")
    operator.process.send_signal(signal.SIGCONT)

    async def is_replaced() -> bool:
        return "demo-rollout-1-2-0" in await world.names()

    await world.until(is_replaced, 40)
    assert operator.process.poll() is None
    assert await holder(world) == "one"
    assert (await world.status())["restarts"] == 0


async def _trainer_is(world: World, *names: str) -> bool:
    return await world.names("trainer") == list(names)


async def _is_served(world: World) -> bool:
    try:
        await world.job()
    except errors.ApiError:
        return False
    return True
