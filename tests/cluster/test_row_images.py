"""Pods whose images rows name, at a real API server with the job's real rendezvous.

The test is the kubelet and the worker.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from tests.cluster.control_plane import ControlPlane
from tests.cluster.dataplane import DataPlane, prompts
from tests.cluster.operators import Operator
from tests.cluster.world import World

GANGS, PODS = 4, 8
ENVIRONMENT: dict[str, Any] = {
    "command": ["agent"],
    "image": "{metadata.image}",
    "allowedImages": ["me/"],
    "pods": PODS,
}
ROLLOUT: dict[str, Any] = {"gpusPerReplica": 0, "replicas": 1, "environment": ENVIRONMENT}
DIGEST = "docker.io/me/a@sha256:1"
REFUSED = 'rpc error: code = NotFound desc = failed to pull "me/b:1": not found'


class Worker:
    """What a worker tells the rendezvous, and what it hears."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}

    def hello(self) -> pb.Member:
        return pb.Member(role="rollout", name="rollout-0", attempt=1, version=-1)

    def heartbeat(self) -> pb.Heartbeat:
        waiting = [
            pb.ImageDemand(role="episode", image=image, pods=count)
            for image, count in self.waiting.items()
        ]
        demand = pb.EpisodePodDemand(waiting=waiting)
        return pb.Heartbeat(state="generating", episode_pods=demand)


async def images(world: World) -> dict[str, str]:
    """Return the image of each episode pod, by name."""
    return {
        name: pod["spec"]["containers"][0]["image"]
        for name, pod in (await world.pods("episode")).items()
    }


async def report(world: World, image: str, **program: Any) -> None:
    """Report as the kubelet of the image's pod how its program's container is."""
    for pod in (await world.pods("episode")).values():
        if pod["spec"]["containers"][0]["image"] == image:
            status = {
                "name": "episode",
                "image": image,
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                **program,
            }
            await world.set_status(pod, containerStatuses=[status])


async def heard(membership: Membership) -> dict[str, str]:
    """Return what the worker hears of two images: the digest, or the error."""
    seen = 0
    async with asyncio.timeout(60):
        while True:
            states = membership.latest.episode_pods if membership.latest else []
            if len(states) == 2:
                return {state.image: state.image_id or state.error for state in states}
            seen = await membership.news(seen)


async def test_pods_come_for_the_images_that_episodes_wait_for(
    plane: ControlPlane,
    operator: Operator,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 200 images at once, an engine's number of pods. A bad image costs its pod alone."""
    if plane.directory is None:
        pytest.skip("cluster IPs of KUBECONFIG's control plane are not addresses of this machine")
    rows = {"data": {"prompts": [{"path": str(prompts(tmp_path))}]}}
    job = await world.running(GANGS, rollout=ROLLOUT, **rows)
    (leader,) = (await world.pods("rollout")).values()
    await world.set_status(leader, podIP="10.0.0.7", podIPs=[{"ip": "10.0.0.7"}])
    data_plane, worker = DataPlane(world, job, tmp_path), Worker()
    try:
        await data_plane.start()
        monkeypatch.setenv("SLUICE_TOKEN", data_plane.token)
        async with Membership(data_plane.rendezvous, worker.hello, worker.heartbeat) as membership:
            await asyncio.wait_for(membership.connected.wait(), 60)
            assert await images(world) == {}, "no pod waits for a row of any image"
            worker.waiting = {"me/a:1": 1, "me/b:1": 1}
            membership.beat()
            await world.until_pods(2, "episode")
            assert sorted((await images(world)).values()) == ["me/a:1", "me/b:1"]

            await report(world, "me/a:1", imageID=DIGEST, state={"running": {}})
            waits = {"waiting": {"reason": "ErrImagePull", "message": REFUSED}}
            await report(world, "me/b:1", state=waits)
            known = await heard(membership)
            assert known["me/a:1"] == DIGEST
            assert known["me/b:1"].startswith(f"ErrImagePull: {REFUSED}")

            worker.waiting = {"me/a:1": 1}  # the episode of the other image has failed
            membership.beat()
            await world.until_pods(1, "episode")
            assert [*(await images(world)).values()] == ["me/a:1"]

            worker.waiting = {f"me/{number}:1": 1 for number in range(200)}
            membership.beat()
            await world.until_pods(PODS, "episode")
            await asyncio.sleep(2.0)  # two more exchanges
            assert len(await images(world)) == PODS
    finally:
        data_plane.stop()
