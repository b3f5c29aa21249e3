"""A job's life: a user creates, changes, suspends and deletes it, and its objects follow."""

from __future__ import annotations

import asyncio

import pytest

from sluice_operator.cluster.kube.paths import collection, path
from tests.cluster.conftest import StartOperator
from tests.cluster.operators import Operator
from tests.cluster.world import OWNED, World

PODS = [
    "demo-buffer-0-1-0",
    "demo-rendezvous-0-1-0",
    "demo-rollout-0-1-0",
    "demo-rollout-1-1-0",
    "demo-trainer-0-1-0",
]


async def test_a_job_gets_its_children_and_owns_them(operator: Operator, world: World) -> None:
    job = await world.create()
    await world.until_pods(5)
    assert await world.names() == PODS
    children = {kind: await world.objects(kind) for kind in OWNED}
    names = {
        kind: [child["metadata"]["name"] for child in children[kind]]
        for kind in OWNED
        if kind != "Pod"
    }
    assert names == {
        "ConfigMap": ["demo-config"],
        "Secret": [f"demo-token-{job['metadata']['uid'][:8]}"],
        "Service": ["demo-rendezvous"],
        "PersistentVolumeClaim": ["demo-buffer", f"demo-checkpoint-{job['metadata']['uid'][:8]}"],
    }
    retained = children["PersistentVolumeClaim"].pop()
    assert retained["metadata"]["labels"]["sluice.dev/job-uid"] == job["metadata"]["uid"]
    assert "ownerReferences" not in retained["metadata"]
    for child in [item for kind in OWNED for item in children[kind]]:
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == (
            "RLJob",
            job["metadata"]["uid"],
            True,
        )
    managers = {entry["manager"] for entry in children["Service"][0]["metadata"]["managedFields"]}
    assert "sluice" in managers
    assert not (await world.job())["metadata"].get("finalizers")


async def test_status_follows_the_pods_and_is_written_only_when_it_changes(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    status = await world.status()
    assert {role["name"]: (role["desired"], role["ready"]) for role in status["roles"]} == {
        "rendezvous": (1, 1),
        "buffer": (1, 1),
        "rollout": (2, 2),
        "trainer": (1, 1),
    }
    assert (await world.condition("Running"))["reason"] == "BufferUnreachable"
    assert status["observedGeneration"] == 1
    await asyncio.sleep(1)
    before = (await world.job())["metadata"]["resourceVersion"]
    await asyncio.sleep(2)
    assert (await world.job())["metadata"]["resourceVersion"] == before


async def test_kubectl_get_shows_the_columns(operator: Operator, world: World) -> None:
    await world.running(5)
    accept = "application/json;as=Table;v=v1;g=meta.k8s.io"
    table = await world.api.get(collection("RLJob", world.namespace), accept=accept)
    columns = [column["name"] for column in table["columnDefinitions"] if not column["priority"]]
    assert columns == [
        "Name",
        "State",
        "Step",
        "Reward",
        "Lag",
        "Rollouts",
        "Version",
        "Restarts",
        "Age",
    ]
    row = dict(zip(columns, table["rows"][0]["cells"], strict=False))
    assert (row["Name"], row["State"], row["Rollouts"], row["Restarts"]) == (
        "demo",
        "Starting",
        2,
        0,
    )
    every = dict(
        zip(
            (column_definition["name"] for column_definition in table["columnDefinitions"]),
            table["rows"][0]["cells"],
            strict=True,
        )
    )
    assert every["Reason"] == (await world.condition("Running"))["reason"]


async def test_suspend_ends_the_pods_in_order_and_resume_starts_new_attempts(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    await world.bind("demo-rollout-0-1-0", "demo-rollout-1-1-0")
    await world.change({"suspend": True})
    await world.until_state("Suspended")
    await asyncio.sleep(1)
    left = [
        "demo-buffer-0-1-0",
        "demo-rendezvous-0-1-0",
        "demo-rollout-0-1-0",
        "demo-rollout-1-1-0",
    ]
    assert await world.names() == left, (
        "the buffer waits for the workers, which return their leases to it"
    )
    await world.gone("demo-rollout-0-1-0", "demo-rollout-1-1-0")
    await world.until_pods(0)
    claims = [claim["metadata"]["name"] for claim in await world.objects("PersistentVolumeClaim")]
    assert claims == ["demo-buffer", (await world.status())["checkpointClaim"]]
    await world.change({"suspend": False})
    await world.until_pods(5)
    assert await world.names() == [name.replace("-1-0", "-2-0") for name in PODS]

    async def is_told() -> bool:  # events come after what they tell of
        return {"Suspended", "Resumed"} <= await world.reasons()

    await world.until(is_told)


async def test_rollouts_are_scaled_through_the_scale_subresource(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    scale = await world.api.get(path("RLJob", world.namespace, "demo", "scale"))
    assert (
        scale["status"]["selector"]
        == "sluice.dev/job-name=demo,sluice.dev/role=rollout,sluice.dev/index=0"
    )
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2)
    await world.api.merge(
        path("RLJob", world.namespace, "demo", "scale"), {"spec": {"replicas": 3}}
    )
    await world.until_pods(3, "rollout")
    await world.api.merge(
        path("RLJob", world.namespace, "demo", "scale"), {"spec": {"replicas": 1}}
    )
    await world.until_pods(1, "rollout")
    assert await world.names("rollout") == ["demo-rollout-0-1-0"]
    await world.api.merge(
        path("RLJob", world.namespace, "demo", "scale"), {"spec": {"replicas": 2}}
    )
    await world.until_pods(2, "rollout")
    assert await world.names("rollout") == ["demo-rollout-0-1-0", "demo-rollout-1-2-0"]
    assert "Scaled" in await world.reasons()


async def test_a_trainer_that_has_done_its_work_ends_the_job(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    await world.bind("demo-rollout-0-1-0")
    await world.finish("demo-trainer-0-1-0", 0)
    status = await world.until_state("Succeeded")
    assert status["completionTime"]
    await asyncio.sleep(1)
    assert "demo-buffer-0-1-0" in await world.names(), "workers end first"
    await world.gone("demo-rollout-0-1-0")
    await world.until_pods(1)
    assert await world.names() == ["demo-trainer-0-1-0"], "an ended pod stays for its log"
    assert "TrainerSucceeded" in await world.reasons()


async def test_a_finished_job_is_deleted_after_its_time(operator: Operator, world: World) -> None:
    await world.running(5, ttlSecondsAfterFinished=1)
    await world.finish("demo-trainer-0-1-0", 0)

    async def is_gone() -> bool:
        return not await world.objects("RLJob")

    await world.until(is_gone)


async def test_a_job_of_another_manager_is_left_alone(operator: Operator, world: World) -> None:
    await world.create(managedBy="kueue.x-k8s.io/multikueue")
    await world.create(name="ours")
    await world.until_pods(5)
    assert {name.split("-")[0] for name in await world.names()} == {"ours"}
    assert await world.status() == {"state": "Pending", "restarts": 0}, (
        "the defaults: nobody wrote any"
    )


@pytest.mark.usefixtures("garbage_collector")
async def test_deletion_leaves_nothing(operator: Operator, world: World) -> None:
    """The garbage collector of a fresh control plane learns of a new kind within half a minute."""
    await world.running(5)
    await world.delete()

    async def nothing_is_left() -> bool:
        return not await world.owned()

    await world.until(nothing_is_left, 60)
    assert "rljob_info{" not in operator.get("/metrics")[1]


@pytest.mark.usefixtures("garbage_collector")
async def test_a_name_may_be_used_again(operator: Operator, world: World) -> None:
    first = await world.create()
    await world.until_pods(5)
    await world.delete()
    second = await world.create()

    async def all_are_new() -> bool:
        pods = (await world.pods()).values()
        owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods}
        return len(pods) == 5 and owners == {second["metadata"]["uid"]}

    await world.until(all_are_new, 60)
    assert first["metadata"]["uid"] != second["metadata"]["uid"]


async def test_a_deleted_job_that_a_finalizer_keeps_has_no_pods(
    operator: Operator, world: World
) -> None:
    await world.running(5)
    await world.api.merge(
        path("RLJob", world.namespace, "demo"), {"metadata": {"finalizers": ["other.dev/keep"]}}
    )
    await world.delete()
    await world.until_pods(0)
    await asyncio.sleep(1)
    assert await world.names() == []
    await world.api.merge(
        path("RLJob", world.namespace, "demo"), {"metadata": {"finalizers": None}}
    )


async def test_one_operator_for_all_namespaces(start: StartOperator, world: World) -> None:
    await start(SLUICE_WATCH_NAMESPACES="")
    await world.create()
    await world.until_pods(5)


async def test_a_job_that_no_operator_has_seen_is_pending(world: World) -> None:
    await world.create()
    assert (await world.status())["state"] == "Pending"
