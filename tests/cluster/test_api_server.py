"""An API server that forgets, refuses, or is restarted under the operator."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection
from tests.cluster.conftest import StartOperator
from tests.cluster.control_plane import USER_TOKEN, ControlPlane, write_kubeconfig
from tests.cluster.world import World

BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"


@pytest.fixture
def ours(plane: ControlPlane) -> ControlPlane:
    if plane.directory is None:
        pytest.skip("the API server of KUBECONFIG is not ours to restart")
    return plane


async def test_a_watch_of_a_version_that_is_forgotten_begins_anew(
    ours: ControlPlane, start: StartOperator, world: World
) -> None:
    """410 Gone: meanwhile a pod has gone, a job has come, and no watch will ever tell."""
    operator = await start(SLUICE_LEASE_SECONDS="60")
    await world.running(5)
    pods = await world.api.get(collection("Pod", world.namespace))
    read_version = pods["metadata"]["resourceVersion"]
    operator.process.send_signal(signal.SIGSTOP)
    command = await ours.stop_api_server()
    ours.start_api_server(command)
    await world.until(lambda: answers(world), 60)
    await world.gone("demo-rollout-1-1-0")
    await world.create("late")
    await world.change({"rollout": {"replicas": 3}})
    command = await ours.stop_api_server()
    ours.start_api_server(command)  # what it has in memory begins anew
    await world.until(lambda: answers(world), 60)
    ours.compact()
    assert await answer_to_a_watch(world, read_version) == 410
    operator.process.send_signal(signal.SIGCONT)
    await world.until(
        lambda: are_there(world, "demo-rollout-1-2-0", "demo-rollout-2-1-0", "late-trainer-0-1-0"),
        90,
    )
    assert operator.process.poll() is None
    assert (await world.status())["restarts"] == 0


async def test_an_api_server_restarted_in_the_middle_of_starts_is_made_good(
    ours: ControlPlane, start: StartOperator, world: World
) -> None:
    operator = await start(SLUICE_LEASE_SECONDS="60")
    for number in range(4):
        await world.create(f"job-{number}")
    await world.until(lambda: some_are_there(world))
    command = await ours.stop_api_server()
    await asyncio.sleep(3)
    ours.start_api_server(command)
    await world.until(lambda: answers(world), 60)
    await world.until_pods(20, seconds=90)
    await asyncio.sleep(2)
    assert {name.split("-")[-2] for name in await world.names()} == {"1"}, "nobody lost an attempt"
    assert operator.process.poll() is None


@pytest.fixture
async def throttled(ours: ControlPlane, api: Api, tmp_path: Path) -> AsyncIterator[str]:
    """Return the kubeconfig of a user for whom the API server handles one write at a time.

    Other writes get 429 with Retry-After.
    """
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "user"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "cluster-admin",
        },
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "user"}],
    }
    await api.create(BINDINGS, binding)
    write_kubeconfig(Path(ours.kubeconfig), tmp_path / "kubeconfig", USER_TOKEN)
    command = await ours.stop_api_server()
    limits = ["--enable-priority-and-fairness=false", "--max-mutating-requests-inflight=1"]
    ours.start_api_server([*command, *limits])
    await wait_for(api)
    yield str(tmp_path / "kubeconfig")
    await ours.stop_api_server()
    ours.start_api_server(command)
    await wait_for(api)
    await api.delete(f"{BINDINGS}/user", {})


async def test_too_many_requests_delay_and_break_nothing(
    throttled: str, start: StartOperator, world: World
) -> None:
    operator = await start(kubeconfig=throttled, SLUICE_LEASE_SECONDS="60")
    for number in range(4):
        await world.create(f"job-{number}", trainer={"nodes": 4})
    await world.until_pods(32, seconds=120)
    assert 'code="429"' in operator.get("/metrics")[1]
    await world.run()
    await world.until(lambda: all_ready(world, 32), 120)
    assert {name.split("-")[-2] for name in await world.names()} == {"1"}
    assert operator.process.poll() is None


async def answer_to_a_watch(world: World, version: str) -> int:
    """Return the code of the error of a watch from this version; 0 without an error."""
    query: dict[str, Any] = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "2"}
    try:
        async for line in world.api.lines(collection("Pod", world.namespace), query):
            event = json.loads(line)
            return int(event["object"]["code"]) if event["type"] == "ERROR" else 0
    except errors.GoneError:
        return 410
    return 0


async def answers(world: World) -> bool:
    try:
        await world.objects("RLJob")
    except errors.ApiError:
        return False
    return True


async def wait_for(api: Api) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await api.get("/apis/sluice.dev/v1alpha1")
                return
            except errors.ApiError:
                await asyncio.sleep(0.2)


async def are_there(world: World, *names: str) -> bool:
    return {*names} <= {*await world.names()}


async def some_are_there(world: World) -> bool:
    return len(await world.names()) > 2


async def all_ready(world: World, count: int) -> bool:
    roles = [
        role
        for job in await world.objects("RLJob")
        for role in (job.get("status") or {}).get("roles", [])
    ]
    return sum(role["ready"] for role in roles) == count
