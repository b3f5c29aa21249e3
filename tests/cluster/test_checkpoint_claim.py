"""The claim for checkpoints at a real API server.

It is created, and kept or deleted with its job. It never belongs to another job.
"""

from __future__ import annotations

import pytest

from tests.cluster.conftest import StartOperator
from tests.cluster.operators import Operator
from tests.cluster.world import Object, World

CLAIM = "PersistentVolumeClaim"


async def claims(world: World) -> dict[str, Object]:
    """Those for checkpoints, by name."""
    by_name = {stored["metadata"]["name"]: stored for stored in await world.objects(CLAIM)}
    return {name: item for name, item in by_name.items() if "-checkpoint-" in name}


async def until_gone(world: World) -> None:
    async def is_gone() -> bool:
        left = [
            stored["metadata"]["name"]
            for stored in await world.objects("Pod") + await world.objects("RLJob")
        ]
        return not left and "demo-buffer" not in [
            stored["metadata"]["name"] for stored in await world.objects(CLAIM)
        ]

    await world.until(is_gone, 60)


def claim_of(pod: Object) -> str:
    """The claim that a trainer's pod mounts for its checkpoints."""
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {
        volume_mount["mountPath"]: volume_mount["name"]
        for volume_mount in pod["spec"]["containers"][0]["volumeMounts"]
    }
    return str(volumes[mounts["/sluice/checkpoint"]]["persistentVolumeClaim"]["claimName"])


@pytest.mark.usefixtures("garbage_collector")
async def test_the_claim_outlives_its_job_and_a_new_job_of_the_name_gets_its_own(
    operator: Operator, world: World
) -> None:
    """The buffer of the new job is empty, so the job could not continue from the old checkpoints.

    It must not overwrite them.
    """
    await world.running(5)
    first = (await world.status())["checkpointClaim"]
    assert list(await claims(world)) == [first]
    await world.delete()
    await until_gone(world)
    assert list(await claims(world)) == [first]
    await world.running(5)
    second = (await world.status())["checkpointClaim"]
    assert sorted(await claims(world)) == sorted([first, second])
    assert second != first
    assert claim_of((await world.pods())["demo-trainer-0-1-0"]) == second
    assert "ApplyFailed" not in await world.reasons()


@pytest.mark.usefixtures("garbage_collector")
async def test_the_claim_goes_with_its_job_where_the_spec_says_so(
    operator: Operator, world: World
) -> None:
    await world.running(5, checkpoint={"storage": {"size": "1Gi", "whenDeleted": "Delete"}})
    (claim,) = (await claims(world)).values()
    assert claim["spec"]["resources"] == {"requests": {"storage": "1Gi"}}
    await world.delete()
    await until_gone(world)

    async def is_gone() -> bool:
        return not await claims(world)

    await world.until(is_gone)


async def test_an_operator_that_starts_anew_finds_the_claim_again(
    start: StartOperator, world: World
) -> None:
    operator = await start()
    await world.running(5)
    (before,) = (await claims(world)).values()
    operator.kill()
    await start()
    await world.change({"suspend": True})
    await world.until_pods(0)
    await world.change({"suspend": False})
    await world.until_pods(5)
    assert claim_of((await world.pods())["demo-trainer-0-2-0"]) == before["metadata"]["name"]
    assert [claim["metadata"]["uid"] for claim in (await claims(world)).values()] == [
        before["metadata"]["uid"]
    ]


async def test_an_ephemeral_job_has_no_claim(operator: Operator, world: World) -> None:
    await world.running(5, checkpoint={"ephemeral": True})
    assert not await claims(world)
    assert "checkpointClaim" not in await world.status()


async def test_a_claim_of_that_name_that_is_somebody_elses_is_not_touched(
    operator: Operator, world: World
) -> None:
    """A uid cannot be guessed, so this owner watches the job or copies another namespace."""
    await world.create(suspend=True)
    uid = (await world.job())["metadata"]["uid"]
    name = f"demo-checkpoint-{uid[:8]}"
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    body = {"apiVersion": "v1", "kind": CLAIM, "metadata": {"name": name}, "spec": spec}
    await world.api.create(f"/api/v1/namespaces/{world.namespace}/persistentvolumeclaims", body)
    await world.change({"suspend": False})

    async def is_told() -> bool:
        return "ApplyFailed" in await world.reasons()

    await world.until(is_told)
    assert not await world.names()
