"""Asks running jobs for their progress: the rendezvous for its members, the buffer for data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
import structlog

from sluice.wire import protocol, rpc, tls
from sluice.wire import queries as wire
from sluice.wire.tls import PLAIN, Tls
from sluice.wire.v1 import buffer_pb2, rendezvous_pb2
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.plan import KubeObject, Progress
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import JobKey, uid

DEADLINE = 5.0
AT_ONCE = 32
LAST_WORD_SECONDS = 2.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """The rendezvous of a job, with the job's token and certificates."""

    rendezvous: str  # host:port of its Service
    token: str
    tls: Tls = PLAIN


async def ask(target: ProbeTarget, deadline: float = DEADLINE) -> Progress | None:
    """Return the job's progress; None without an answer in time, as while the buffer starts."""
    try:
        async with asyncio.timeout(deadline):
            return await _ask(target)
    except (TimeoutError, grpc.aio.AioRpcError) as error:
        _log(target, error)
        return None


def _log(target: ProbeTarget, error: TimeoutError | grpc.aio.AioRpcError) -> None:
    """Log why a job did not answer.

    Silence is normal and shown in the job's status. A peer that refuses the job's token or the
    protocol version deserves a warning.
    """
    if isinstance(error, TimeoutError):
        log.debug("probe failed", rendezvous=target.rendezvous, cause="no answer in time")
    elif error.code() == grpc.StatusCode.UNAUTHENTICATED or tls.refusal(error.details()):
        text = (
            "the job's token or certificate is not the one that this operator derives; was its key "
            "replaced?"
        )
        log.warning(
            text,
            rendezvous=target.rendezvous,
            cause=tls.refusal(error.details()) or error.details(),
        )
    elif protocol.is_refusal(error.trailing_metadata()):
        text = "the job's pods are of another release, so its progress is unknown"
        log.warning(text, rendezvous=target.rendezvous, cause=error.details())
    else:
        log.debug("probe failed", rendezvous=target.rendezvous, cause=error.code().name)


async def _ask(target: ProbeTarget) -> Progress | None:
    # A channel for each question: a job is asked every few seconds, and a thousand open channels
    # would cost more.
    async with rpc.channel(target.rendezvous, target.tls) as channel:
        ledger = await wire.ledger(channel, target.token)
    address = wire.buffer_address(ledger)
    if address is None:
        return None
    async with rpc.channel(address, target.tls) as channel:
        return progress_of(await wire.stats(channel, target.token), ledger)


def progress_of(stats: buffer_pb2.BufferStats, ledger: rendezvous_pb2.Ledger) -> Progress:
    """Combine both answers for the planner."""
    engines = [
        entry
        for entry in ledger.entries
        if entry.member.role == "rollout" and entry.member.index == 0
    ]
    behind = [e for e in engines if not e.admitted or e.member.version != ledger.version]
    # Generations are numbered in the order in which engines join and are dropped.
    dropped = [entry for entry in behind if entry.last_error]
    newest = max(dropped, key=lambda entry: entry.generation, default=None)
    return Progress(
        step=stats.step,
        total_steps=stats.total_steps or None,
        reward=stats.metrics.get("rollout/raw_reward"),
        loss=stats.metrics.get("train/loss"),
        version=stats.version,
        lag=stats.policy_lag,
        engines=len(engines),
        engines_in_sync=len(engines) - len(behind),
        dropped=f"{newest.member.name}: {newest.last_error}" if newest else "",
        device_seconds=dict(ledger.device_seconds),
        counters=dict(stats.counters),
    )


Ask = Callable[[ProbeTarget, float], Awaitable[Progress | None]]


class ClusterMemory(Protocol):
    """A cluster's memory of a job's objects."""

    def pods_of(self, stored: KubeObject) -> list[KubeObject]: ...
    def owned(self, stored: KubeObject) -> Mapping[tuple[str, str], KubeObject]: ...


class Prober:
    """Asks jobs and remembers the last answer of each.

    keys: derive the jobs' tokens. deadline: seconds in which a job has to answer.
    """

    def __init__(self, keys: JobKeys, ask_one: Ask = ask, deadline: float = DEADLINE) -> None:
        self._keys, self._ask, self._deadline = keys, ask_one, deadline
        self._answers: dict[str, Progress | None] = {}
        self._limit = asyncio.Semaphore(AT_ONCE)

    async def latest(self, cluster: ClusterMemory, stored: KubeObject) -> Progress | None:
        """Return the last answer.

        After the trainer's end the job is asked once more, for its last step.
        """
        key = uid(stored)
        target = target_of(cluster, stored, self._keys)
        if target is None:
            self._answers.pop(key, None)
            return None
        if any(
            podstate.role(pod) == "trainer" and podstate.succeeded(pod)
            for pod in cluster.pods_of(stored)
        ):
            return await self._ask(target, LAST_WORD_SECONDS) or self._answers.get(key)
        return self._answers.get(key)

    async def ask_all(self, cluster: ClusterMemory, jobs: Sequence[KubeObject]) -> list[JobKey]:
        """Ask every job that can answer, and return those whose answer has changed."""
        keys = await asyncio.gather(*(self._ask_one(cluster, stored) for stored in jobs))
        return [key for key in keys if key is not None]

    def forget(self, job: str) -> None:
        self._answers.pop(job, None)

    async def _ask_one(self, cluster: ClusterMemory, stored: KubeObject) -> JobKey | None:
        target = target_of(cluster, stored, self._keys)
        if target is None:
            return None
        async with self._limit:
            answer = await self._ask(target, self._deadline)
        before = self._answers.get(uid(stored))
        self._answers[uid(stored)] = answer
        return key_of(stored) if answer != before else None


def target_of(cluster: ClusterMemory, stored: KubeObject, keys: JobKeys) -> ProbeTarget | None:
    """Return the address to ask; None if the job, its rendezvous or its buffer does not run."""
    status = stored.get("status") or {}
    if status.get("state") in (None, "", "Suspended", "Succeeded", "Failed"):
        return None
    name, owned = stored["metadata"]["name"], cluster.owned(stored)
    service, config = (
        owned.get(("Service", f"{name}-rendezvous")),
        owned.get(("ConfigMap", f"{name}-config")),
    )
    running = {podstate.role(pod) for pod in cluster.pods_of(stored) if podstate.is_running(pod)}
    if service is None or config is None or not {"rendezvous", "buffer"} <= running:
        return None
    address, port = service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]
    host = f"[{address}]" if ":" in address else address
    return ProbeTarget(f"{host}:{port}", keys.token(uid(stored)), _tls(stored, config, keys))


def _tls(stored: KubeObject, config: KubeObject, keys: JobKeys) -> Tls:
    # As in the spec that the pods were started with; the stored spec may have changed since.
    started = json.loads(config["data"][names.JOB_FILE])["spec"]
    if not (started.get("tls") or {}).get("enabled"):
        return PLAIN
    metadata = stored["metadata"]
    name = names.server_name(metadata["name"], metadata["namespace"])
    return Tls(keys.authority(uid(stored)).encode(), name)


def key_of(stored: KubeObject) -> JobKey:
    return stored["metadata"]["namespace"], stored["metadata"]["name"]
