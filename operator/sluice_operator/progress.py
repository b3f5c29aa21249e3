"""Asks running jobs how far they are, one by one or all of them: the rendezvous for members, the
buffer for data.
"""

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
    """rendezvous: host:port of the job's Service; token, tls: the job's."""

    rendezvous: str
    token: str
    tls: Tls = PLAIN


async def ask(target: ProbeTarget, deadline: float = DEADLINE) -> Progress | None:
    """The job's progress; None: nobody answers in time, which may be because the buffer is
    starting, or gone.
    """
    try:
        async with asyncio.timeout(deadline):
            return await _ask(target)
    except (TimeoutError, grpc.aio.AioRpcError) as error:
        _tell(target, error)
        return None


def _tell(target: ProbeTarget, error: TimeoutError | grpc.aio.AioRpcError) -> None:
    """Silence is normal, and shown in the job's status. A peer that does not take the job's token,
    or our protocol, is not.
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
        text = "the job's pods are of another release, and its progress is not known"
        log.warning(text, rendezvous=target.rendezvous, cause=error.details())
    else:
        log.debug("probe failed", rendezvous=target.rendezvous, cause=error.code().name)


async def _ask(target: ProbeTarget) -> Progress | None:
    """A channel for each question: a job is asked every few seconds, and a thousand open channels
    cost more.
    """
    async with rpc.channel(target.rendezvous, target.tls) as channel:
        ledger = await wire.ledger(channel, target.token)
    address = wire.buffer_address(ledger)
    if address is None:
        return None
    async with rpc.channel(address, target.tls) as channel:
        return progress_of(await wire.stats(channel, target.token), ledger)


def progress_of(stats: buffer_pb2.BufferStats, ledger: rendezvous_pb2.Ledger) -> Progress:
    """The two answers as the planner wants them."""
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
    """The cluster's knowledge of a job."""

    def pods_of(self, stored: KubeObject) -> list[KubeObject]: ...
    def owned(self, stored: KubeObject) -> Mapping[tuple[str, str], KubeObject]: ...


class Prober:
    """Remembers the last answer of each job. keys: what the jobs' tokens are made from; deadline:
    seconds an answer.
    """

    def __init__(self, keys: JobKeys, ask_one: Ask = ask, deadline: float = 5.0) -> None:
        self._keys, self._ask, self._deadline = keys, ask_one, deadline
        self._answers: dict[str, Progress | None] = {}
        self._limit = asyncio.Semaphore(AT_ONCE)

    async def latest(self, seen: ClusterMemory, stored: KubeObject) -> Progress | None:
        """The last answer; a trainer that has just ended is asked for once
        more, for its last step.
        """
        key = uid(stored)
        target = target_of(seen, stored, self._keys)
        if target is None:
            self._answers.pop(key, None)
            return None
        if any(
            podstate.role(pod) == "trainer" and podstate.succeeded(pod)
            for pod in seen.pods_of(stored)
        ):
            return await self._ask(target, LAST_WORD_SECONDS) or self._answers.get(key)
        return self._answers.get(key)

    async def ask_all(self, seen: ClusterMemory, jobs: Sequence[KubeObject]) -> list[JobKey]:
        """Ask every job that can answer; those whose answer is a new one."""
        keys = await asyncio.gather(*(self._ask_one(seen, stored) for stored in jobs))
        return [key for key in keys if key is not None]

    def forget(self, job: str) -> None:
        self._answers.pop(job, None)

    async def _ask_one(self, seen: ClusterMemory, stored: KubeObject) -> JobKey | None:
        target = target_of(seen, stored, self._keys)
        if target is None:
            return None
        async with self._limit:
            answer = await self._ask(target, self._deadline)
        before = self._answers.get(uid(stored))
        self._answers[uid(stored)] = answer
        return key_of(stored) if answer != before else None


def target_of(seen: ClusterMemory, stored: KubeObject, keys: JobKeys) -> ProbeTarget | None:
    """The address to ask; None: the job does not run, or what can be asked does not."""
    status = stored.get("status") or {}
    if status.get("state") in (None, "", "Suspended", "Succeeded", "Failed"):
        return None
    name, owned = stored["metadata"]["name"], seen.owned(stored)
    service, config = (
        owned.get(("Service", f"{name}-rendezvous")),
        owned.get(("ConfigMap", f"{name}-config")),
    )
    running = {podstate.role(pod) for pod in seen.pods_of(stored) if podstate.is_running(pod)}
    if service is None or config is None or not {"rendezvous", "buffer"} <= running:
        return None
    address, port = service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]
    host = f"[{address}]" if ":" in address else address
    return ProbeTarget(f"{host}:{port}", keys.token(uid(stored)), _tls(stored, config, keys))


def _tls(stored: KubeObject, config: KubeObject, keys: JobKeys) -> Tls:
    """By the spec that the pods were started with:
    the stored one may ask for something else since.
    """
    started = json.loads(config["data"][names.JOB_FILE])["spec"]
    if not (started.get("tls") or {}).get("enabled"):
        return PLAIN
    metadata = stored["metadata"]
    name = names.server_name(metadata["name"], metadata["namespace"])
    return Tls(keys.authority(uid(stored)).encode(), name)


def key_of(stored: KubeObject) -> JobKey:
    return stored["metadata"]["namespace"], stored["metadata"]["name"]
