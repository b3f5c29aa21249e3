"""Asks running jobs how far they are: the rendezvous for the members, the buffer for the data."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc.aio
import structlog

from sluice.wire import protocol, rpc, tls
from sluice.wire.tls import PLAIN, Tls
from sluice.wire.v1 import buffer_pb2, buffer_pb2_grpc, rendezvous_pb2, rendezvous_pb2_grpc
from sluice_operator.plan import Progress

DEADLINE = 5.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """rendezvous: host:port of the job's Service; token, tls: the job's."""

    rendezvous: str
    token: str
    tls: Tls = PLAIN


async def ask(target: Target, deadline: float = DEADLINE) -> Progress | None:
    """The job's progress; None: nobody answers in time, which may be because the buffer is starting, or gone."""
    try:
        async with asyncio.timeout(deadline):
            return await _ask(target)
    except (TimeoutError, grpc.aio.AioRpcError) as error:
        _tell(target, error)
        return None


def _tell(target: Target, error: TimeoutError | grpc.aio.AioRpcError) -> None:
    """Silence is normal, and shown in the job's status. A peer that does not take the job's token, or our protocol,
    is not.
    """
    if isinstance(error, TimeoutError):
        log.debug("probe failed", rendezvous=target.rendezvous, cause="no answer in time")
    elif error.code() == grpc.StatusCode.UNAUTHENTICATED or tls.refusal(error.details()):
        text = "the job's token or certificate is not the one that this operator derives; was its key replaced?"
        log.warning(text, rendezvous=target.rendezvous, cause=tls.refusal(error.details()) or error.details())
    elif protocol.is_refusal(error.trailing_metadata()):
        text = "the job's pods are of another release, and its progress is not known"
        log.warning(text, rendezvous=target.rendezvous, cause=error.details())
    else:
        log.debug("probe failed", rendezvous=target.rendezvous, cause=error.code().name)


async def _ask(target: Target) -> Progress | None:
    """A channel for each question: a job is asked every few seconds, and a thousand open channels cost more."""
    metadata = rpc.metadata(target.token)
    async with rpc.channel(target.rendezvous, target.tls) as channel:
        stub = rendezvous_pb2_grpc.RendezvousStub(channel)
        ledger = await stub.GetLedger(rendezvous_pb2.GetLedgerRequest(), metadata=metadata)
    address = next((entry.member.address for entry in ledger.entries if entry.member.role == "buffer"), None)
    if address is None:
        return None
    async with rpc.channel(address, target.tls) as channel:
        stats = await buffer_pb2_grpc.BufferStub(channel).Stats(buffer_pb2.StatsRequest(), metadata=metadata)
    return progress_of(stats, ledger)


def progress_of(stats: buffer_pb2.BufferStats, ledger: rendezvous_pb2.Ledger) -> Progress:
    """What the planner wants to know of both answers."""
    engines = [entry for entry in ledger.entries if entry.member.role == "rollout" and entry.member.index == 0]
    return Progress(
        step=stats.step,
        total_steps=stats.total_steps or None,
        reward=stats.metrics.get("rollout/raw_reward"),
        loss=stats.metrics.get("train/loss"),
        version=stats.version,
        lag=stats.policy_lag,
        engines=len(engines),
        engines_in_sync=sum(entry.admitted and entry.member.version == ledger.version for entry in engines),
    )
