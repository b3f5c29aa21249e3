"""Owners of a job's objects: finalizers of others, orphans, and the ways to delete a job."""

from __future__ import annotations

import asyncio

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.plan.manifests.optional_objects import OPTIONAL
from tests.cluster.operators import Operator
from tests.cluster.test_lifecycle import PODS
from tests.cluster.world import OWNED, World

KEEP = "other.dev/keep"
TRAINER = "demo-trainer-0-1-0"


async def keep(world: World, pod: str, *finalizers: str) -> None:
    await world.api.merge(
        path("Pod", world.namespace, pod), {"metadata": {"finalizers": [*finalizers] or None}}
    )


async def test_a_pod_that_a_finalizer_keeps_holds_up_its_gangs_next_attempt(
    operator: Operator, world: World
) -> None:
    """It may run still, for all that anybody knows; others go on."""
    await world.running(5, failurePolicy={"rolloutBackoffSeconds": 1})
    await keep(world, TRAINER, KEEP)
    await world.finish(TRAINER, 1, "error: boom")
    await world.until(lambda: attempt_is(world, "trainer", 2))
    await world.finish("demo-rollout-0-1-0", 1, "error: out of memory", container="engine")
    await world.until(lambda: are_there(world, "demo-rollout-0-2-0"))
    assert await world.names("trainer") == [TRAINER]
    assert (await world.pods())[TRAINER]["metadata"]["deletionTimestamp"]
    await keep(world, TRAINER)
    await world.until(lambda: are_there(world, "demo-trainer-0-2-0"))
    assert await world.names("trainer") == ["demo-trainer-0-2-0"]
    assert (await world.gang("trainer"))["restarts"] == 1


async def test_a_suspended_job_waits_for_a_pod_that_a_finalizer_keeps(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    await keep(world, "demo-rollout-0-1-0", KEEP)
    await world.change({"suspend": True})
    await world.until_pods(3)
    assert "demo-buffer-0-1-0" in await world.names(), (
        "the buffer stays as long as a worker may report to it"
    )
    await keep(world, "demo-rollout-0-1-0")
    await world.until_pods(0)


@pytest.mark.usefixtures("garbage_collector")
async def test_a_deleted_job_leaves_what_a_finalizer_keeps_and_the_operator_does_not_mind(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    await keep(world, TRAINER, KEEP)
    await world.delete()
    await world.until_pods(1, seconds=60)
    await asyncio.sleep(1)
    await keep(world, TRAINER)
    await world.until_pods(0)
    assert operator.metric("controller_runtime_reconcile_errors_total") == 0


@pytest.mark.usefixtures("garbage_collector")
async def test_foreground_deletion_ends_the_pods_before_the_job(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    await world.bind("demo-rollout-0-1-0")
    await world.delete(policy="Foreground")
    await world.until_pods(1, seconds=60)
    assert await world.names() == ["demo-rollout-0-1-0"]
    assert (await world.job())["metadata"]["deletionTimestamp"]
    await world.gone("demo-rollout-0-1-0")
    await world.until(lambda: nothing_is_left(world), 60)


@pytest.mark.usefixtures("garbage_collector")
async def test_orphans_are_left_alone_and_a_new_job_of_their_name_is_told(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    await world.delete(policy="Orphan")
    await world.until(lambda: has_no_owner(world), 60)
    await world.create()
    await world.until(lambda: is_told(world))
    assert await pod_names(world) == PODS
    for kind in (*OWNED, *OPTIONAL):
        for name in await everything(world, kind):
            await world.api.delete(path(kind, world.namespace, name), {"gracePeriodSeconds": 0})
    await world.until_pods(5, seconds=60)


async def attempt_is(world: World, role: str, attempt: int) -> bool:
    return bool((await world.gang(role)).get("attempt") == attempt)


async def are_there(world: World, *names: str) -> bool:
    return {*names} <= {*await world.names()}


async def nothing_is_left(world: World) -> bool:
    return not await world.owned(*OWNED, "RLJob")


async def is_told(world: World) -> bool:
    return "ApplyFailed" in await world.reasons()


async def pod_names(world: World) -> list[str]:
    return sorted(await everything(world, "Pod"))


async def everything(world: World, kind: str) -> list[str]:
    """Return the names of objects with a job's name, of kinds that the API server serves."""
    at = collection(kind, world.namespace)
    try:
        objects = (await world.api.get(at))["items"] or []
    except errors.MissingApiError:
        return []
    return [
        stored["metadata"]["name"]
        for stored in objects
        if stored["metadata"]["name"].startswith("demo-")
    ]


async def has_no_owner(world: World) -> bool:
    at = collection("Pod", world.namespace)
    pods = (await world.api.get(at))["items"]
    jobs = await world.objects("RLJob")
    return (
        len(pods) == 5
        and not jobs
        and not any("ownerReferences" in pod["metadata"] for pod in pods)
    )
