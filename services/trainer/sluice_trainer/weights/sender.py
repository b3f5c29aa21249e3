"""Sender of weights: takes one rank's share of the engines through the phases of an update.

The phases are prepare, pause, transfer, verify and resume. All engines pass them concurrently, and
each phase has a deadline. No engine waits for another one that is frozen, dead or cut off: each
engine answers a probe before any engine is paused, `phases` gives up an engine that alone is late
or has left the rendezvous, and each engine resumes as soon as it is verified.

Every rank of the trainer sends to its share of the engines (`share`), so that several links and
CPUs work in parallel. Rank 0 asks the rendezvous which engines take part and tells the other ranks.
An engine that fails in a phase is reported and skipped: the rendezvous drops it from the epoch, its
communicator is aborted, and the update goes on with the others. It comes back as a joiner, with a
new communicator, and gets all weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import aiohttp
import grpc.aio

from sluice.api import WeightSync
from sluice.engines.protocol import BaseModel, Control, Engine, EngineRefusedError
from sluice.telemetry import logs
from sluice.wire import rpc
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.lateness import StepTimes
from sluice_trainer.weights.outcome import RunningUpdate, UpdateOutcome
from sluice_trainer.weights.phases import EngineProgress, PhaseAction, PhaseRunner, phase_name
from sluice_trainer.weights.transport import Peer, Transport

T = TypeVar("T")
CALL_SECONDS = 30.0
MEMBERS_CALL_SECONDS = 5.0
_COMPARE = "compare models"


def share(engines: Sequence[pb.EngineMember], rank: int, world_size: int) -> list[pb.EngineMember]:
    """Return the engines that trainer rank `rank` sends to.

    Engines are spread evenly over ranks, and every rank computes the same result.
    """
    count = len(engines)
    if count >= world_size:
        return [engine for i, engine in enumerate(engines) if i % world_size == rank]
    return [engine for i, engine in enumerate(engines) if i * world_size // count == rank]


class UntilStopped(Protocol):
    """Awaits a coroutine; may cancel it and raise Stopped once the trainer was told to end."""

    async def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


async def _run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    return await coroutine


class WeightSender:
    """Brings weight updates to one rank's share of the engines.

    It runs on the background's event loop.
    """

    def __init__(
        self,
        stub: rendezvous_pb2_grpc.RendezvousStub,
        caller: tuple[str, int],
        sync: WeightSync,
        transport: Transport,
        engine: Engine,
        *,
        in_pool: bool = False,
        colocated: bool = False,
        until_stopped: UntilStopped = _run_to_end,
    ) -> None:
        """Create a sender without connections.

        Parameters
        ----------
        stub
            Client of the rendezvous.
        caller
            Name and attempt of this trainer rank.
        sync
            Settings of weight updates.
        transport
            The way to the engines.
        engine
            Kind of the engines.
        in_pool
            The engines are those of a pool.
        colocated
            Engines share the trainer's GPUs: they wake up for an update and have released their
            memory before it (`rest`).
        until_stopped
            Waits for a rendezvous that is unreachable.

        """
        self._stub = stub
        self._colocated = colocated
        self._name, self._attempt = caller
        self._source = f"{self._name}/{self._attempt}"
        self._sync = sync
        self._transport = transport
        self._engine = engine
        self._until_stopped = until_stopped
        self._in_pool = in_pool
        # The model of an adapter that is sent alone; None: all weights are sent.
        self.base: BaseModel | None = None
        # Engines that have the same model, with attempt and generation.
        self._compared: set[tuple[str, int, int]] = set()
        self._http: aiohttp.ClientSession | None = None
        self._controls: dict[tuple[str, int], Control] = {}
        self._prepared: set[str] = set()
        self._sending = asyncio.Lock()
        # Engines that share the trainer's GPUs are idle until all of them have the weights, so a
        # late one delays no other.
        self._runner = PhaseRunner(
            transport,
            self._members,
            StepTimes(sync.late_seconds),
            judge=not colocated,
        )
        self.current: RunningUpdate | None = None

    async def close(self) -> None:
        if self._http:
            await self._http.close()

    async def plan(self, version: int, *, joiners_only: bool) -> pb.UpdatePlan:
        """Return the rendezvous' plan of an update: the engines that take part, for all ranks."""
        request = pb.BeginUpdateRequest(
            source=self._name, attempt=self._attempt, version=version, joiners_only=joiners_only
        )

        async def call() -> pb.UpdatePlan:
            plan: pb.UpdatePlan = await self._stub.BeginUpdate(
                request, metadata=rpc.metadata(), timeout=CALL_SECONDS
            )
            return plan

        return await self._call_rendezvous(call, "BeginUpdate", 600.0)

    async def keep(self, engines: Sequence[pb.EngineMember]) -> None:
        """Close everything that is open towards other engines than these.

        The others were scaled down, replaced, or belong to another rank now.
        """
        kept = {(e.member.address, e.member.attempt) for e in engines}
        self._controls = {key: control for key, control in self._controls.items() if key in kept}
        names = {e.member.name for e in engines}
        for name in self._prepared - names:
            self._transport.abandon(name)
        self._prepared &= names
        self._compared = {engine for engine in self._compared if engine[0] in names}
        self._runner.step_times.keep(names)

    async def rest(self, version: int, engines: Sequence[pb.EngineMember]) -> None:
        """Have the engines stop generating and release their GPU memory, in colocated mode.

        An engine that cannot is dropped.
        """
        peers = [self._peer(engine) for engine in engines]
        self.current = RunningUpdate(version, {peer.name: peer for peer in peers})
        await self._run("rest", (pb.UPDATE_PHASE_PAUSE, lambda peer: peer.control.rest()))
        self.current = None

    async def prepare(self, version: int, engines: Sequence[pb.EngineMember]) -> None:
        """Begin an update of these engines and create missing communicators; pauses no engine."""
        peers = [self._peer(engine) for engine in engines]
        self.current = RunningUpdate(version, {peer.name: peer for peer in peers})
        self._prepared.update(self.current.peers)
        self._runner.step_times.begin()
        # The probe also learns which engines can relay, on which the routes depend.
        await self._run("answer", (pb.UPDATE_PHASE_PREPARE, self._answer))
        taking_part = map(_identity, self.current.peers.values())
        if self.base and not self._compared.issuperset(taking_part):
            # An engine that has just started may still be reading its files.
            await self._run(
                _COMPARE, (pb.UPDATE_PHASE_PREPARE, self._compare_models), connects=True
            )
        self._transport.plan_routes(list(self.current.peers.values()))
        await self._run(
            "connect", (pb.UPDATE_PHASE_PREPARE, self._transport.prepare), connects=True
        )
        await self._report_all(pb.UPDATE_PHASE_PREPARE)

    async def pause(self) -> None:
        update = self._update()
        update.paused_since, update.seconds["pause"] = time.monotonic(), 0.0
        if self._pauses:
            await self._run("pause", (pb.UPDATE_PHASE_PAUSE, self._pause))

    async def send(self, bucket: Bucket) -> None:
        """Transfer one bucket, after earlier ones, to every engine that is still in the update."""
        update = self._update()

        async def send(peer: Peer) -> None:
            await self._transport.send(peer, bucket, update.version, flush=self._flushes(peer))

        for peer in update.peers.values():
            self._transport.announce(peer, bucket, update.version, flush=self._flushes(peer))
        async with self._sending:
            await self._transport.stage(bucket, update.version)
            await self._run("transfer", (pb.UPDATE_PHASE_TRANSFER, send), connects=True)
        update.bytes += bucket.data.numel() * len(update.peers)

    def _flushes(self, peer: Peer) -> bool:
        """Return True if the last bucket also empties the engine's prefix cache."""
        return peer.control.may_flush(self._sync.pause_mode)

    async def finish(self) -> UpdateOutcome:
        """Verify and resume the engines, and report that they serve the new weights."""
        update, started = self._update(), time.monotonic()
        update.verified = update.resumed = started
        await self._run(
            "finish",
            (pb.UPDATE_PHASE_VERIFY, self._verify),
            (pb.UPDATE_PHASE_RESUME, self._resume),
        )
        update.seconds["verify"] = update.verified - started
        update.seconds["resume"] = max(update.resumed - update.verified, 0.0)
        update.seconds["paused"] = update.resumed - update.paused_since if self._pauses else 0.0
        await self._report_all(pb.UPDATE_PHASE_RESUME)
        self.current = None
        relayed = tuple(sorted(self._transport.relayed))
        return UpdateOutcome(
            tuple(update.peers),
            update.failed,
            update.seconds,
            update.bytes,
            relayed,
            dict(self._transport.rerouted),
            len(update.peers.keys() - set(relayed)) if self._transport.in_turn else 0,
            update.refused,
        )

    async def _answer(self, peer: Peer) -> None:
        """Probe an engine before any engine is paused and would have to wait for its answer.

        The only engine of a job needs no probe.
        """
        await peer.control.learn()
        if len(self._update().peers) > 1 or self._runner.step_times.has_others(peer.name):
            await peer.control.version()

    async def _compare_models(self, peer: Peer) -> None:
        """Check that an engine that gets an adapter alone has read the trainer's model."""
        if self.base is None or _identity(peer) in self._compared:
            return
        model = await peer.control.base_model()
        if model.digest != self.base.digest:
            raise EngineRefusedError(
                different_models(self.base, model, pool=self._in_pool), answered=True
            )
        self._compared.add(_identity(peer))

    @property
    def _pauses(self) -> bool:
        """False if an engine holds several versions: an update adds one and interrupts nothing."""
        return self._sync.pause_mode != "versions"

    @property
    def _in_session(self) -> bool:
        """True if an update runs in a session of the engine, which adapters do not need."""
        return self._transport.in_session and self._sync.lora == "merged"

    async def _pause(self, peer: Peer) -> None:
        await peer.control.pause(self._sync.pause_mode)
        if self._colocated:
            await peer.control.wake()
        if self._in_session:
            await peer.control.begin()

    async def _verify(self, peer: Peer) -> None:
        if self._in_session:
            await peer.control.end()
        # With several versions each has a prefix cache, which stays valid.
        has_old_cache = not self._flushes(peer) and self._pauses
        async with asyncio.TaskGroup() as group:
            if has_old_cache:
                group.create_task(peer.control.try_flush())
            if self._sync.verify:
                group.create_task(self._check_version(peer))
        self._update().verified = time.monotonic()

    async def _resume(self, peer: Peer) -> None:
        if self._colocated:
            await peer.control.wake_cache()
        if self._pauses:
            await peer.control.resume()
        self._update().resumed = time.monotonic()

    async def _check_version(self, peer: Peer) -> None:
        served, expected = await peer.control.version(), str(self._update().version)
        if served != expected:
            raise EngineRefusedError(
                f"the engine says that it serves weight version {served}, expected {expected}"
            )

    async def _run(self, step: str, *phases: PhaseAction, connects: bool = False) -> None:
        """Run phases on all engines that are in the update; an engine that fails leaves it."""
        update = self._update()
        started = time.monotonic()
        engines = await self._runner.run(
            step,
            list(update.peers.values()),
            *phases,
            connects=connects,
            timeout=self._sync.timeout_seconds,
        )
        if len(phases) == 1:
            name = phase_name(phases[0][0])
            update.seconds[name] = update.seconds.get(name, 0.0) + time.monotonic() - started
        update.refused |= {
            progress.peer.name: progress.failure
            for progress in engines
            if progress.refused and (progress.phase == pb.UPDATE_PHASE_TRANSFER or step == _COMPARE)
        }
        for phase, _ in phases:
            await self._report(phase, _failed(engines, phase))

    async def _members(self) -> set[tuple[str, int]] | None:
        """Return name and attempt of each engine that is a member of the rendezvous.

        None if the rendezvous is unreachable, or has restarted during this update and does not know
        its members yet.
        """
        update, request = self._update(), pb.GetLedgerRequest()
        try:
            ledger: pb.Ledger = await self._stub.GetLedger(
                request, metadata=rpc.metadata(), timeout=MEMBERS_CALL_SECONDS
            )
        except grpc.aio.AioRpcError:
            return None
        if ledger.version < update.version:
            return None
        return {(entry.member.name, entry.member.attempt) for entry in ledger.entries}

    async def _report_all(self, phase: pb.UpdatePhase) -> None:
        """Report that all remaining engines have passed, and drop those that have left the epoch.

        It is not called after every phase, because paused engines must not wait for the rendezvous.
        """
        await self._report(phase, dict.fromkeys(self._update().peers.values(), ""))

    async def _report(self, phase: pb.UpdatePhase, errors: Mapping[Peer, str]) -> None:
        """Report the results of a phase to the rendezvous in one call.

        errors: reason of each engine's failure, empty if it passed. Failed engines leave the
        update.
        """
        update = self._update()
        report = pb.PhaseReport(
            source=self._name,
            attempt=self._attempt,
            version=update.version,
            phase=phase,
            engines=[
                pb.EngineReport(engine=p.name, attempt=p.attempt, generation=p.generation, error=e)
                for p, e in errors.items()
            ],
        )

        async def call() -> pb.PhaseAck:
            ack: pb.PhaseAck = await self._stub.ReportPhase(
                report, metadata=rpc.metadata(), timeout=CALL_SECONDS
            )
            return ack

        if not errors:
            return
        ack = await self._call_rendezvous(call, "ReportPhase", 60.0)
        # Engines that passed may have left the epoch meanwhile.
        gone = set(ack.gone)
        for peer, error in errors.items():
            if error or peer.name in gone:
                reason = error or "it left the epoch"
                logs.get().warning("engine left the update", engine=peer.name, reason=reason)
                self._transport.abandon(peer.name)
                update.failed[peer.name] = reason
                del update.peers[peer.name]

    async def _call_rendezvous(
        self, call: Callable[[], Awaitable[T]], what: str, seconds: float
    ) -> T:
        """Call the rendezvous until it answers; may raise Stopped while it is unreachable."""
        asking = rpc.retrying(call, what=f"{what} at the rendezvous", seconds=seconds)
        return await self._until_stopped(asking)

    def _peer(self, engine: pb.EngineMember) -> Peer:
        member = engine.member
        if self._http is None:
            self._http = self._engine.session()
        key = (member.address, member.attempt)
        if (control := self._controls.get(key)) is None:
            control = self._engine.control(
                member.address, self._http, self._sync.timeout_seconds, self._source
            )
            self._controls[key] = control
        return Peer(member.name, member.attempt, engine.generation, member.world_size, control)

    def _update(self) -> RunningUpdate:
        if self.current is None:
            raise RuntimeError("no weight update is under way")
        return self.current


def _failed(engines: Sequence[EngineProgress], phase: pb.UpdatePhase) -> dict[Peer, str]:
    """Return the engines that are given up in this phase, with the reasons."""
    return {
        progress.peer: progress.failure
        for progress in engines
        if progress.failure and progress.phase == phase
    }


def _identity(peer: Peer) -> tuple[str, int, int]:
    """Return what changes if an engine starts again, and may read another model."""
    return peer.name, peer.attempt, peer.generation


def different_models(trainers: BaseModel, engines: BaseModel, *, pool: bool) -> str:
    """Say that an adapter of the trainer's model does not fit the model that an engine has."""
    return (
        f"the adapter is of the model {trainers.path} (digest {trainers.digest[:12]}), and the "
        f"engine has read other tensors from {engines.path} (digest {engines.digest[:12]}): give "
        + (
            "the job the pool's model"
            if pool
            else "both the same files, or set weightSync.lora: merged"
        )
    )
