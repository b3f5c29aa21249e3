"""Episodes in pods on the real node of KUBECONFIG: how many a second, and how long until they ask.

    python benchmarks/episode_pods.py --image IMAGE [--episodes 100] [--pods 16]

The pods are as the operator makes them; IMAGE has Python and sluice
(tests/node/image.py). The worker is this process: it listens on the node's address. Warm: pods wait
for episodes, and each that has ended is replaced. Cold: each episode's pod is created when its turn
has come. The time to the first request begins when the episode has its turn.

The node's bridge must have a MAC address of its own (`ip link set BRIDGE address ...`): one that
takes that of its newest port loses connections of all pods whenever a pod comes or goes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.episodes import TOKEN, Worker, worker
from sluice.api import RLJob
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.plan.decide.episodes import (
    EpisodePod,
    EpisodeSlot,
    missing_episode_pods,
    surplus_episode_pods,
)
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import Images, KubeObject
from sluice_operator.plan.manifests.episodes import episode_pod
from tests.cluster.world import SPEC
from tests.integration.engines import save_model

AGENT = Path(__file__).parents[1] / "tests/node/agent.py"
NODE, NAMESPACE = "10.244.0.1", "episodes"


@dataclass
class OnNode:
    """Pods of a job on the real node. The job is there for its pods' manifests alone."""

    api: Api
    job: RLJob
    image: str
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def create(self, index: int) -> None:
        slot = EpisodeSlot(names.EPISODE, 0, 1, index, NODE)
        pod = episode_pod(
            self.job, EpisodePod(slot, next(self.numbers)), Images(rollout=self.image)
        )
        await self.api.create(collection("Pod", NAMESPACE), pod)

    async def keep(self, count: int, *, warm: bool) -> None:
        """Do the operator's work: delete pods that have ended; if warm, keep a pod in each slot."""
        slots = [EpisodeSlot(names.EPISODE, 0, 1, index, NODE) for index in range(count)]
        while True:
            pods = await self.pods()
            for missing in missing_episode_pods(self.job, slots, pods) if warm else ():
                await self.create(missing.slot.index)
            for surplus in surplus_episode_pods(slots, pods, datetime.now(UTC)):
                await self.delete(surplus.name, surplus.grace)
            await asyncio.sleep(0.1)

    async def pods(self) -> list[KubeObject]:
        return list((await self.api.get(collection("Pod", NAMESPACE)))["items"] or [])

    async def delete(self, name: str, grace: int) -> None:
        with contextlib.suppress(errors.NotFoundError):
            options = {"gracePeriodSeconds": grace}
            await self.api.delete(path("Pod", NAMESPACE, name), options)

    async def clear(self) -> None:
        while pods := await self.pods():
            for pod in pods:
                await self.delete(pod["metadata"]["name"], 0)
            await asyncio.sleep(0.5)


async def at_node(count: int, pods: int, image: str, model: Path) -> None:
    async with (
        await Api.connect() as api,
        worker(model, None, NODE, names.PORTS["gateway"]) as episode_worker,
    ):
        job = job_of(image)
        await prepare(api, job)
        try:
            await warm(OnNode(api, job, image), episode_worker, count, pods)
            await cold(OnNode(api, job, image), episode_worker, count, pods)
        finally:
            await api.delete(f"/api/v1/namespaces/{NAMESPACE}", {})


async def warm(node: OnNode, episode_worker: Worker, count: int, pods: int) -> None:
    keeping = asyncio.create_task(node.keep(pods, warm=True))
    try:
        while episode_worker.pods.episodes.waiting < pods:
            await asyncio.sleep(0.1)
        await timed(f"{pods} warm pods", episode_worker, count, pods, episode_worker.play)
    finally:
        keeping.cancel()
        await node.clear()
    while episode_worker.pods.episodes.waiting:  # until their connections have ended too
        await asyncio.sleep(0.1)


async def cold(node: OnNode, episode_worker: Worker, count: int, pods: int) -> None:
    async def play(number: int) -> None:
        await asyncio.gather(episode_worker.play(number), node.create(number))

    keeping = asyncio.create_task(node.keep(count, warm=False))
    try:
        await timed(f"cold, {pods} side by side", episode_worker, count, pods, play)
    finally:
        keeping.cancel()
        await node.clear()


async def timed(
    what: str, episode_worker: Worker, count: int, pods: int, play: Callable[[int], Awaitable[None]]
) -> None:
    episode_worker.engine.waited.clear()
    begun, numbers = time.perf_counter(), iter(range(count))

    async def one_after_another() -> None:
        for number in numbers:
            await play(number)

    await asyncio.gather(*(one_after_another() for _ in range(pods)))
    seconds, waited = time.perf_counter() - begun, sorted(episode_worker.engine.waited)
    print(
        f"{what}: {count} episodes in {seconds:.0f} s, {count / seconds:.2f} a second; first "
        f"request after {statistics.median(waited):.2f} s (median), {waited[0]:.2f} to "
        f"{waited[-1]:.2f}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def job_of(image: str) -> RLJob:
    volume = {"name": "agent", "configMap": {"name": "agent"}}
    mount = {"name": "agent", "mountPath": "/agent"}
    program = {"name": "episode", "imagePullPolicy": "Never", "volumeMounts": [mount]}
    sidecar = {"name": "sidecar", "imagePullPolicy": "Never"}
    environment = {
        "command": ["python", "/agent/agent.py"],
        "image": image,
        "env": {"HANGS_AT": "-1"},
        "template": {"spec": {"containers": [program, sidecar], "volumes": [volume]}},
    }
    spec = SPEC | {"rollout": {"gpusPerReplica": 0, "environment": environment}}
    return RLJob.model_validate({"metadata": {"name": "e", "namespace": NAMESPACE}, "spec": spec})


async def prepare(api: Api, job: RLJob) -> None:
    """The namespace, with what the pods need of their job."""
    await api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    secret = {"metadata": {"name": names.episode_token_name(job)}, "stringData": {"token": TOKEN}}
    await api.create(collection("Secret", NAMESPACE), secret)
    code = {"metadata": {"name": "agent"}, "data": {"agent.py": AGENT.read_text()}}
    await api.create(collection("ConfigMap", NAMESPACE), code)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", required=True)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--pods", type=int, default=16)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model", 0)
        asyncio.run(at_node(options.episodes, options.pods, options.image, model))


if __name__ == "__main__":
    main()
