"""What the operator and workers tell each other of pods whose images rows name.

The rendezvous is the real service.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice.runtime.pod_env import free_port
from sluice.wire import rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_operator import episode_pods
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.episode_pods import EpisodePodExchange, uses_row_images
from sluice_operator.plan import KubeObject
from sluice_operator.plan.facts.model import WorkerDemand
from sluice_operator.progress import ProbeTarget
from sluice_rendezvous.service import RendezvousService
from tests.unit.operator.test_plan_row_images import FIRST, row_pod

KEYS = JobKeys(bytes(32))
TOKEN = KEYS.token("u")
SECONDS = 30.0
JOB: KubeObject = {
    "metadata": {"name": "demo", "namespace": "default", "uid": "u"},
    "spec": {"rollout": {"environment": {"image": "{metadata.image}"}}},
}


class Memory:
    """The operator's memory of the job's pods."""

    def __init__(self, *pods: KubeObject) -> None:
        self.pods = pods

    def pods_of(self, stored: KubeObject) -> list[KubeObject]:
        return list(self.pods)

    def owned(self, stored: KubeObject) -> dict[tuple[str, str], KubeObject]:
        return {}


def pod(index: int, **program: Any) -> KubeObject:
    """A pod of me/a whose program has a container status."""
    statuses = [{"name": "sidecar", "state": {"running": {}}}, {"name": "episode", **program}]
    made = row_pod(index, "me/a", phase="Pending", containerStatuses=statuses)
    made["metadata"]["uid"] = f"pod-{index}"
    return made


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    server = rpc.server(TOKEN)
    rendezvous_pb2_grpc.add_RendezvousServicer_to_server(RendezvousService(), server)
    bound = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0')}"
    await server.start()
    monkeypatch.setenv("SLUICE_TOKEN", TOKEN)
    monkeypatch.setattr(episode_pods, "target_of", lambda *_: ProbeTarget(bound, TOKEN))
    yield bound
    await server.stop(None)


@contextlib.asynccontextmanager
async def worker(address: str, demand: pb.EpisodePodDemand) -> AsyncIterator[Membership]:
    hello = pb.Member(role="rollout", name="rollout-0", attempt=1, version=0)
    async with Membership(
        address, lambda: hello, lambda: pb.Heartbeat(state="idle", episode_pods=demand)
    ) as membership:
        await asyncio.wait_for(membership.connected.wait(), SECONDS)
        yield membership


async def heard(membership: Membership) -> list[pb.EpisodePodState]:
    """Return the states that the worker hears next."""
    seen = 0
    async with asyncio.timeout(SECONDS):
        while not (membership.latest and membership.latest.episode_pods):
            seen = await membership.news(seen)
    return list(membership.latest.episode_pods)


async def test_the_operator_hears_what_workers_wait_for(address: str) -> None:
    demand = pb.EpisodePodDemand(
        waiting=[pb.ImageDemand(role="episode", image="me/a", pods=2)], joined=[FIRST]
    )
    exchange = EpisodePodExchange(KEYS)
    assert exchange.demands(JOB) == {}
    async with worker(address, demand):
        async with asyncio.timeout(SECONDS):
            while await exchange.exchange_all(Memory(), [JOB]) != [("default", "demo")]:
                await asyncio.sleep(0.05)
            expected = {(0, 1): WorkerDemand((("episode", "me/a", 2),), frozenset({FIRST}))}
            while exchange.demands(JOB) != expected:
                await exchange.exchange_all(Memory(), [JOB])
        assert await exchange.exchange_all(Memory(), [JOB]) == [], "nothing has changed"
    exchange.forget("u")
    assert exchange.demands(JOB) == {}


async def test_a_worker_hears_of_digests_and_of_what_the_registry_says(address: str) -> None:
    """A kubelet that waits to pull again no longer says why the registry refused the image."""
    exchange = EpisodePodExchange(KEYS)
    digest = "docker.io/me/a@sha256:1"
    pulled = pod(0, state={"running": {}}, imageID=digest)
    async with worker(address, pb.EpisodePodDemand()) as membership:
        failing = pod(1, **waiting("ErrImagePull", "docker.io/me/a: not found"))
        await exchange.exchange_all(Memory(pulled, failing), [JOB])
        failing = pod(1, **waiting("ImagePullBackOff", 'Back-off pulling image "me/a"'))
        await exchange.exchange_all(Memory(pulled, failing), [JOB])
        known, refused = await heard(membership)
    assert (known.pod, known.image, known.image_id) == (FIRST, "me/a", digest)
    assert refused.pod == "demo-episode-0-1-1-1"
    assert refused.error.startswith("ErrImagePull: docker.io/me/a: not found")


async def test_a_job_that_does_not_answer_keeps_its_last_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = ProbeTarget(f"127.0.0.1:{free_port()}", TOKEN)
    monkeypatch.setattr(episode_pods, "target_of", lambda *_: closed)
    exchange = EpisodePodExchange(KEYS)
    exchange._demands["u"] = {(0, 1): WorkerDemand()}
    assert await exchange.exchange_all(Memory(), [JOB]) == []
    assert exchange.demands(JOB) == {(0, 1): WorkerDemand()}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (None, False),
        ({"command": ["agent"]}, False),
        ({"image": "me/a"}, False),
        ({"image": "{metadata.image}"}, True),
        ({"image": "me/a", "verifier": {"image": "me/{metadata.name}"}}, True),
    ],
    ids=["none", "a process", "one image", "the row's image", "the verifier's"],
)
def test_only_jobs_whose_rows_name_images_are_asked(
    environment: dict[str, Any] | None, expected: bool
) -> None:
    stored = {"spec": {"rollout": {"environment": environment}}}
    assert uses_row_images(stored) is expected
