"""Rollout replicas by hand, by `kubectl scale`, and by a HorizontalPodAutoscaler."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest

from sluice.api import API_VERSION, KIND
from sluice_operator.cluster.kube.paths import path
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operators import Operator
from tests.cluster.world import SPEC, Object, World
from tests.tools import tool

AUTOSCALERS = "/apis/autoscaling/v1/namespaces/{}/horizontalpodautoscalers"
# The controller looks every 15 s, and learns of a new kind within half a minute.
HPA_SECONDS = 120.0


def kubectl(plane: ControlPlane, world: World, *arguments: str) -> str:
    command = [str(tool("kubectl")), "--namespace", world.namespace, *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"KUBECONFIG": plane.kubeconfig},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_kubectl_scales_and_waits(
    plane: ControlPlane, operator: Operator, world: World
) -> None:
    await world.running(5)
    await asyncio.to_thread(kubectl, plane, world, "scale", "rljob/demo", "--replicas=4")
    await world.until_pods(4, "rollout")
    scale = await world.api.get(path("RLJob", world.namespace, "demo", "scale"))
    await world.until(lambda: replicas_are(world, 4))
    assert scale["spec"]["replicas"] == 4
    selected = await asyncio.to_thread(
        kubectl,
        plane,
        world,
        "get",
        "pods",
        "--selector",
        scale["status"]["selector"],
        "--output=name",
    )
    assert sorted(selected.split()) == [f"pod/{name}" for name in await world.names("rollout")]
    await asyncio.to_thread(
        kubectl, plane, world, "scale", "rljob/demo", "--current-replicas=4", "--replicas=1"
    )
    await world.until_pods(1, "rollout")
    assert await world.names("trainer") == ["demo-trainer-0-1-0"]


async def test_an_engine_of_many_pods_counts_once(
    plane: ControlPlane, operator: Operator, world: World
) -> None:
    """An autoscaler takes the number of selected pods for the number of engines."""
    await world.create(rollout={"gpusPerReplica": 0, "replicas": 2, "nodesPerReplica": 3})
    await world.until_pods(6, "rollout")
    await world.until(lambda: replicas_are(world, 2))
    scale = await world.api.get(path("RLJob", world.namespace, "demo", "scale"))
    selector = scale["status"]["selector"]
    selected = await asyncio.to_thread(
        kubectl, plane, world, "get", "pods", "--selector", selector, "--output=name"
    )
    assert sorted(selected.split()) == ["pod/demo-rollout-0-1-0", "pod/demo-rollout-1-1-0"]


async def test_what_is_scaled_away_drains(operator: Operator, world: World) -> None:
    """Pods get their grace, to give their leases back; the numbers say at once what is wanted."""
    await world.running(5, rollout={"template": {"spec": {"terminationGracePeriodSeconds": 45}}})
    await world.bind("demo-rollout-0-1-0", "demo-rollout-1-1-0")
    await world.change({"rollout": {"replicas": 1}})
    await world.until(lambda: is_ending(world, "demo-rollout-1-1-0"))
    pods = await world.pods("rollout")
    assert pods["demo-rollout-1-1-0"]["metadata"]["deletionGracePeriodSeconds"] == 45
    assert "deletionTimestamp" not in pods["demo-rollout-0-1-0"]["metadata"]
    assert (await world.status())["rolloutReplicas"] == 1
    await world.change({"rollout": {"replicas": 2}})
    await asyncio.sleep(1)
    assert await world.names("rollout") == ["demo-rollout-0-1-0", "demo-rollout-1-1-0"], (
        "attempts never overlap"
    )
    await world.gone("demo-rollout-1-1-0")
    await world.until(lambda: rollouts_are(world, "demo-rollout-0-1-0", "demo-rollout-1-2-0"))
    assert (await world.status())["restarts"] == 0


@pytest.mark.usefixtures("garbage_collector")
async def test_an_autoscaler_keeps_its_bounds(operator: Operator, world: World) -> None:
    """Even without metrics it keeps the number within its bounds, through /scale alone."""
    await world.running(5)
    await autoscaler(world, minReplicas=3, maxReplicas=5)
    await world.until(lambda: rollout_count_is(world, 3), HPA_SECONDS)
    bounds = {"spec": {"minReplicas": 1, "maxReplicas": 1}}
    await world.api.merge(f"{AUTOSCALERS.format(world.namespace)}/demo", bounds)
    await world.until(lambda: rollout_count_is(world, 1), HPA_SECONDS)
    scaler = await world.api.get(f"{AUTOSCALERS.format(world.namespace)}/demo")
    assert scaler["status"]["desiredReplicas"] == 1


async def test_a_job_without_a_number_can_be_scaled(operator: Operator, world: World) -> None:
    await world.create(rollout={"gpusPerReplica": 0, "replicas": None})
    await world.until_pods(1, "rollout")
    at = path("RLJob", world.namespace, "demo", "scale")
    assert (await world.api.get(at))["spec"]["replicas"] == 1
    await world.api.merge(at, {"spec": {"replicas": 3}})
    await world.until_pods(3, "rollout")


async def test_a_manifest_without_a_number_leaves_that_of_an_autoscaler(world: World) -> None:
    """It is applied again after the autoscaler has scaled the job."""
    at = path("RLJob", world.namespace, "demo")
    rollout = {key: value for key, value in SPEC["rollout"].items() if key != "replicas"}
    manifest: Object = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "demo"},
        "spec": {**SPEC, "rollout": rollout},
    }
    await world.api.apply(at, manifest)
    await world.api.merge(f"{at}/scale", {"spec": {"replicas": 3}})
    manifest["spec"]["activeDeadlineSeconds"] = 86400
    spec = (await world.api.apply(at, manifest))["spec"]
    assert (spec["activeDeadlineSeconds"], spec["rollout"]["replicas"]) == (86400, 3)


async def test_the_least_number_holds_below_what_an_autoscaler_asks_for(
    operator: Operator, world: World
) -> None:
    await world.create(rollout={"gpusPerReplica": 0, "replicas": 3, "minReplicas": 2})
    await world.until_pods(3, "rollout")
    await world.change({"rollout": {"replicas": 1}})
    await world.until(lambda: replicas_are(world, 2))
    await world.until_pods(2, "rollout")


async def autoscaler(world: World, **bounds: int) -> None:
    target = {"apiVersion": "sluice.dev/v1alpha1", "kind": "RLJob", "name": "demo"}
    body: Object = {
        "apiVersion": "autoscaling/v1",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "demo"},
        "spec": {"scaleTargetRef": target, "targetCPUUtilizationPercentage": 50, **bounds},
    }
    await world.api.create(AUTOSCALERS.format(world.namespace), body)


async def replicas_are(world: World, count: int) -> bool:
    scale = await world.api.get(path("RLJob", world.namespace, "demo", "scale"))
    return bool(scale["status"]["replicas"] == count)


async def rollout_count_is(world: World, count: int) -> bool:
    return len(await world.names("rollout")) == count


async def rollouts_are(world: World, *names: str) -> bool:
    return await world.names("rollout") == list(names)


async def is_ending(world: World, name: str) -> bool:
    return "deletionTimestamp" in (await world.pods())[name]["metadata"]
