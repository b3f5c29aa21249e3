"""Episodes whose pods Sandboxes make, at a real API server, by an operator with the chart's rights.

What agent-sandbox's controller does is done by a stand-in (tests/cluster/sandboxes.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import path
from tests.cluster.conftest import StartOperator, StartUnder
from tests.cluster.releases import Release
from tests.cluster.sandboxes import GROUP, SandboxController, agent_sandbox
from tests.cluster.world import Object, World

PODS, GANGS, EPISODES = 3, 4, 12
ENVIRONMENT: dict[str, Any] = {
    "command": ["agent"],
    "image": "me/agent:1",
    "pods": PODS,
    "sandbox": {},
    "template": {"metadata": {"labels": {"team": "a"}}, "spec": {"runtimeClassName": "gvisor"}},
    "verifier": {"command": ["judge"], "pods": 1},
}
ROLLOUT: dict[str, Any] = {"gpusPerReplica": 0, "replicas": 1, "environment": ENVIRONMENT}
# The garbage collector learns of a new kind within half a minute.
COLLECTOR_SECONDS = 90.0


async def engine_runs(world: World) -> None:
    """An engine that runs at an address, as a kubelet says."""

    async def all_run() -> bool:
        await world.run()
        return sum(role["ready"] for role in (await world.status()).get("roles", [])) == GANGS

    await world.until(all_run)
    (leader,) = (await world.pods("rollout")).values()
    await world.set_status(leader, podIP="10.0.0.7", podIPs=[{"ip": "10.0.0.7"}])


async def is_told(world: World, text: str) -> None:
    """The job's condition says it."""

    async def says() -> bool:
        return text in (await world.condition("Running")).get("message", "")

    await world.until(says)


@contextlib.asynccontextmanager
async def runtime_class(api: Api, name: str) -> AsyncIterator[None]:
    at = "/apis/node.k8s.io/v1/runtimeclasses"
    body = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "runsc"}
    await api.create(at, body | {"metadata": {"name": name}})
    try:
        yield
    finally:
        await api.delete(f"{at}/{name}", {})


@pytest.mark.usefixtures("garbage_collector")
async def test_episodes_come_and_go_with_their_sandboxes(
    api: Api, world: World, release: Release, start_under: StartUnder
) -> None:
    """The job is applied before agent-sandbox and the runtime class exist.

    Then episodes end, a pod is deleted, the operator is killed, and the job is deleted.
    """
    release.install("--set", f"crds.install=false,replicas=0,watchNamespaces={{{world.namespace}}}")
    first = await start_under(release)
    await world.create(rollout=ROLLOUT)
    await is_told(world, f"does not serve Sandbox of {GROUP}/v1beta1 or v1alpha1")
    assert await world.names() == []
    assert "ApiMissing" in await world.reasons()
    controller = SandboxController(world, "v1beta1")
    async with agent_sandbox(api, "v1beta1", "v1alpha1"), controller.working():
        await engine_runs(world)
        await is_told(world, 'RuntimeClass "gvisor" not found')
        async with runtime_class(api, "gvisor"):
            await world.until_pods(PODS, "episode")
            await world.until_pods(1, "verifier")
            await is_made_by_its_sandbox(world, await controller.sandboxes())
            await play(world, controller)
            await a_pod_that_is_deleted_goes_with_its_sandbox(world, controller)
            first.kill()
            second = await start_under(release)
            await world.delete()

            async def nothing_is_left() -> bool:
                return not (await world.names() or await controller.sandboxes())

            await world.until(nothing_is_left, COLLECTOR_SECONDS)
    assert [log for log in (first.log, second.log) if "cannot" in log.read_text()] == []


async def is_made_by_its_sandbox(world: World, sandboxes: dict[str, Object]) -> None:
    pods = {**await world.pods("episode"), **await world.pods("verifier")}
    assert sandboxes.keys() == pods.keys(), "and none of the job's own pods"
    for name, pod in pods.items():
        (owner,) = pod["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Sandbox", sandboxes[name]["metadata"]["uid"])
        assert pod["metadata"]["labels"]["sluice.dev/job-name"] == "demo", "policies select by it"
        assert pod["spec"]["restartPolicy"] == "Never"
    episodes = [pod for name, pod in pods.items() if "-episode-" in name]
    assert {pod["spec"]["runtimeClassName"] for pod in episodes} == {"gvisor"}
    teams = {sandbox["metadata"]["labels"].get("team") for sandbox in sandboxes.values()}
    assert teams == {"a", None}, "the template's labels; the verifier has none"


async def a_pod_that_is_deleted_goes_with_its_sandbox(
    world: World, controller: SandboxController
) -> None:
    (victim, *_) = await world.names("episode")
    await world.bind(victim)  # so that it takes its time to end
    await world.api.delete(path("Pod", world.namespace, victim), {"gracePeriodSeconds": 30})

    async def has_ended() -> bool:
        return victim not in await controller.sandboxes()

    await world.until(has_ended)
    await world.gone(victim)
    await world.until_pods(PODS, "episode")
    assert victim not in await world.names("episode")


async def play(world: World, controller: SandboxController) -> None:
    """Episodes end, one after another; what is left in the end is a pool, as at first."""
    over: set[str] = set()

    async def all_have_played() -> bool:
        for name, pod in (await world.pods("episode")).items():
            if name not in over and not pod["metadata"].get("deletionTimestamp"):
                with contextlib.suppress(errors.NotFoundError):
                    await world.end(pod, code=len(over) % 2)
                over.add(name)
        return len(over) >= EPISODES

    await world.until(all_have_played)

    async def replaced() -> bool:
        left = {*await world.names("episode"), *await controller.sandboxes()}
        return not over & left and len(await world.names("episode")) == PODS

    await world.until(replaced, COLLECTOR_SECONDS)
    assert (await world.status())["restarts"] == 0
    assert len(await controller.sandboxes()) == PODS + 1


async def test_an_older_release_is_spoken_to(api: Api, world: World, start: StartOperator) -> None:
    controller = SandboxController(world, "v1alpha1")
    async with (
        agent_sandbox(api, "v1alpha1"),
        runtime_class(api, "gvisor"),
        controller.working(),
    ):
        await start()
        await world.create(rollout=ROLLOUT)
        await engine_runs(world)
        await world.until_pods(PODS, "episode")
        assert len(await controller.sandboxes()) == PODS + 1
