"""Exchanges facts about episode pods with the rendezvous of jobs whose rows name their images.

Workers tell the rendezvous which images their episodes wait for, and the operator creates the pods.
The operator in turn reports what the cluster says of these pods: the digest of an image, or why a
registry refuses it. Both are soft state, which every exchange repeats.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

import grpc.aio
import structlog

from sluice.container_images import is_from_row
from sluice.wire import rpc
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.plan import KubeObject
from sluice_operator.plan.facts import podstate
from sluice_operator.plan.facts.model import Gang, JobKey, WorkerDemand, WorkerDemands, uid
from sluice_operator.plan.report.blocked import refused_container
from sluice_operator.progress import AT_ONCE, ClusterMemory, ProbeTarget, key_of, target_of

EXCHANGE_SECONDS = 1.0
_DEADLINE = 5.0
# A kubelet's reason while it waits to try again. The registry's message was in the state before.
_BACK_OFF = "ImagePullBackOff"

log = structlog.get_logger(__name__)


class EpisodePodExchange:
    """The last demands of jobs whose rows name the images of pods."""

    def __init__(self, keys: JobKeys) -> None:
        """Create an exchange without answers. keys: derive the jobs' tokens."""
        self._keys = keys
        self._demands: dict[str, WorkerDemands] = {}
        # Registries' messages about pods, by uids of job and pod.
        self._refusals: dict[str, dict[str, str]] = {}
        self._limit = asyncio.Semaphore(AT_ONCE)

    def demands(self, stored: KubeObject) -> WorkerDemands:
        """Return the last demands of a job's workers; empty if there are none."""
        return self._demands.get(uid(stored), {})

    def forget(self, job: str) -> None:
        self._demands.pop(job, None)
        self._refusals.pop(job, None)

    async def exchange_all(
        self, cluster: ClusterMemory, jobs: Sequence[KubeObject]
    ) -> list[JobKey]:
        """Exchange facts with all jobs that need it, and return those whose demand has changed."""
        keys = await asyncio.gather(
            *(self._exchange(cluster, stored) for stored in jobs if uses_row_images(stored))
        )
        return [key for key in keys if key is not None]

    async def _exchange(self, cluster: ClusterMemory, stored: KubeObject) -> JobKey | None:
        target, job = target_of(cluster, stored, self._keys), uid(stored)
        if target is None:
            self.forget(job)
            return None
        pods = [pod for pod in cluster.pods_of(stored) if podstate.row_image(pod)]
        refusals = _refusals(pods, self._refusals.get(job, {}))
        self._refusals[job] = refusals
        async with self._limit:
            answer = await _ask(target, states(pods, refusals))
        if answer is None:
            return None
        before, self._demands[job] = self._demands.get(job), _demands(answer)
        return key_of(stored) if self._demands[job] != before else None


def uses_row_images(stored: KubeObject) -> bool:
    """Return True if rows name the images of the job's pods."""
    environment = (stored["spec"].get("rollout") or {}).get("environment") or {}
    verifier = environment.get("verifier") or {}
    return is_from_row(environment.get("image")) or is_from_row(verifier.get("image"))


def states(pods: Iterable[KubeObject], refusals: dict[str, str]) -> dict[str, pb.EpisodePodStates]:
    """Return what the cluster says of pods, by name of the worker's member."""
    by_worker = defaultdict[str, pb.EpisodePodStates](pb.EpisodePodStates)
    for pod in pods:
        image_id, error = _image_id(pod), refusals.get(uid(pod), "")
        if image_id or error:
            worker = Gang("rollout", podstate.replica(pod), 1).name
            by_worker[worker].pods.add(
                pod=podstate.name(pod),
                image=podstate.row_image(pod),
                image_id=image_id,
                error=error,
            )
    return by_worker


def _image_id(pod: KubeObject) -> str:
    """Return the image of the pod's program with its digest; empty before it was pulled."""
    statuses = podstate.container_statuses(pod)
    program = (status for status in statuses if status["name"] == podstate.role(pod))
    return next((str(status.get("imageID") or "") for status in program), "")


def _refusals(pods: Iterable[KubeObject], before: dict[str, str]) -> dict[str, str]:
    """Return why the programs of pods cannot start, by uid of the pod.

    before: the result of the last exchange. It has the registry's message while a kubelet waits.
    """
    found = {}
    for pod in pods:
        refused = refused_container(pod)
        if refused is not None and refused.container == podstate.role(pod):
            message = f"{refused.reason}: {refused.message}"
            waits = refused.reason == _BACK_OFF
            found[uid(pod)] = before.get(uid(pod), message) if waits else message
    return found


def _demands(answer: pb.EpisodePodsResponse) -> WorkerDemands:
    return {
        (int(worker.name.rpartition("-")[2]), worker.attempt): WorkerDemand(
            tuple((item.role, item.image, item.pods) for item in worker.demand.waiting),
            frozenset(worker.demand.joined),
        )
        for worker in answer.workers
    }


async def _ask(
    target: ProbeTarget, reported: dict[str, pb.EpisodePodStates]
) -> pb.EpisodePodsResponse | None:
    """Exchange facts with one job; None if it does not answer in time."""
    try:
        async with (
            asyncio.timeout(_DEADLINE),
            rpc.channel(target.rendezvous, target.tls) as channel,
        ):
            stub = rendezvous_pb2_grpc.RendezvousStub(channel)
            request = pb.EpisodePodsRequest(states=reported)
            answer: pb.EpisodePodsResponse = await stub.EpisodePods(
                request, metadata=rpc.metadata(target.token)
            )
            return answer
    except (TimeoutError, grpc.aio.AioRpcError) as error:
        # The probe of the job's progress reports why a rendezvous refuses the operator.
        log.debug("no exchange about episode pods", rendezvous=target.rendezvous, cause=repr(error))
        return None
