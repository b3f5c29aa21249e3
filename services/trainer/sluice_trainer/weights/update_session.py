"""The engines as the training loop has them: blocking calls, of which one after the other makes a
weight update.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.engines import engine_of
from sluice.engines.protocol import Layout, StackName
from sluice.runtime.pod_env import Environment
from sluice.telemetry import logs
from sluice.wire import rpc
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_trainer.clients.background import Background
from sluice_trainer.clients.membership import Member
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.chain import Chain
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.disk import Disk, VersionOnly
from sluice_trainer.weights.ipc import Ipc, colocated_with
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.sender import WeightSender, share
from sluice_trainer.weights.transport import Transport

CALL_SECONDS = 60.0
PATIENCE_SECONDS = 600.0
POLL_SECONDS = 1.0
ENGINE_START_SECONDS = 1500.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class UpdateSession:
    """This rank's side of all weight updates. Every method blocks, has a deadline, and may raise
    Stopped.
    """

    def __init__(
        self, env: Environment, spec: RLJobSpec, member: Member, rank: int, background: Background
    ) -> None:
        self._env, self._spec, self._rank = env, spec, rank
        self._member, self._background = member, background
        self._background.call(self._open())

    async def _open(self) -> None:
        self._channel = rpc.channel(self._env.rendezvous)
        self._rendezvous = rendezvous_pb2_grpc.RendezvousStub(self._channel)
        colocated, sync = self._spec.trainer.colocate, self._spec.weight_sync
        resolved = {"transport": self._transport_kind} | (
            {"pause_mode": "abort"} if colocated else {}
        )
        self._source = WeightSender(
            self._rendezvous,
            (self._env.name, self._env.attempt),
            sync.model_copy(update=resolved),
            self._transport(),
            engine_of(self._spec),
            colocated=colocated,
            until_stopped=self._background.until_stopped,
        )

    def close(self) -> None:
        async def shut() -> None:
            await self._source.close()
            await self._channel.close()

        self._background.call(shut())

    @property
    def layout(self) -> Layout:
        """The layout of tensors that the engines want."""
        return engine_of(self._spec).layout

    @property
    def stack_name(self) -> StackName | None:
        """Engines' names for all experts of a layer as one tensor.

        None: they get each by its name in Hugging Face's files, as a directory has them.
        """
        stacked = self.layout.takes_stacks(self._spec) and self._transport_kind != "disk"
        return self.layout.stack_name if stacked else None

    @property
    def _transport_kind(self) -> str:
        return self._spec.transport(one_machine=self._env.advertise in _LOOPBACK)

    def _transport(self) -> Transport:
        sync, kind = self._spec.weight_sync, self._transport_kind
        if self._spec.debug.rollout_only:
            return VersionOnly()
        if kind == "disk":
            directory = self._env.directory("checkpoint_dir") / "weights"
            return Disk(directory, Path(self._spec.model.path), self._env.attempt)
        if kind == "ipc":
            return Ipc()
        direct = Collective(
            kind,
            self._env.advertise,
            sync.timeout_seconds,
            f"{self._env.name}-{self._env.attempt}-{self._rank}",
        )
        if sync.fan_out == "direct":
            return direct
        return Chain(direct)

    # --- before and between updates

    def await_engines(self, count: int) -> None:
        """Colocated, before anything of ours is on a GPU: until so many engines have started, each
        alone on its GPUs.

        Who has not come in ENGINE_START_SECONDS is not waited for.
        """

        async def come() -> None:
            end = time.monotonic() + ENGINE_START_SECONDS
            while len(engines := await self._engines()) < count:
                if time.monotonic() > end:
                    logs.get().warning("engines are missing", came=len(engines), expected=count)
                    return
                await asyncio.sleep(POLL_SECONDS)

        self._background.call(come(), stoppable=True)

    def rest(self) -> None:
        """Colocated: all engines give their GPUs' memory to the trainer; those that have already
        are left alone.
        """
        entries = self._background.call(self._engines(), stoppable=True)
        engines = [pb.EngineMember(member=e.member, generation=e.generation) for e in entries]
        self._background.call(self._source.rest(self._member.version, engines))

    def joiners(self) -> bool:
        """True where an engine waits for weights."""
        request = pb.GetLedgerRequest(joiners_to=self._member.version)
        return bool(self._background.call(self._engines(request), stoppable=True))

    def generated_tokens(self) -> float:
        """Tokens that the engines of now have generated since their start."""
        engines = self._background.call(self._engines(), stoppable=True)
        return float(sum(e.gauges["generated_tokens"] for e in engines))

    async def _engines(self, request: pb.GetLedgerRequest | None = None) -> list[pb.LedgerEntry]:
        """The rendezvous' entry of each engine: that of its first pod, which serves HTTP."""
        asked = request or pb.GetLedgerRequest()

        async def ask() -> pb.Ledger:
            ledger: pb.Ledger = await self._rendezvous.GetLedger(
                asked, metadata=rpc.metadata(), timeout=CALL_SECONDS
            )
            return ledger

        ledger = await rpc.retrying(
            ask, what="GetLedger at the rendezvous", seconds=PATIENCE_SECONDS
        )
        return [e for e in ledger.entries if e.member.role == "rollout" and e.member.index == 0]

    # --- an update

    def plan(self, version: int, *, joiners_only: bool) -> pb.UpdatePlan:
        """Rank 0: fix who takes part in the update to `version`; the plan goes to every rank."""
        self._member.version = version
        return self._background.call(self._source.plan(version, joiners_only=joiners_only))

    def shares(
        self, engines: Sequence[pb.EngineMember], world_size: int
    ) -> list[list[pb.EngineMember]]:
        """The engines that each rank sends to. A directory has one writer; memory of a GPU is
        opened on that GPU.
        """
        ranks = range(world_size)
        if self._transport_kind == "ipc" and self._spec.on_gpu:
            gpus = self._spec.rollout.gpus_per_replica
            return [colocated_with(engines, rank, gpus) for rank in ranks]
        senders = 1 if self._transport_kind == "disk" else world_size
        return [share(engines, rank, senders) for rank in ranks]

    def keep(self, engines: Sequence[pb.EngineMember]) -> None:
        """Give up what is open towards all engines but these, which are this rank's share of all
        there are.
        """
        self._background.call(self._source.keep(engines))

    def prepare(self, version: int, engines: Sequence[pb.EngineMember]) -> Future[None]:
        """Begin to bring `version` to this rank's share of the engines."""
        return self._background.start(self._source.prepare(version, engines))

    def pause(self) -> None:
        self._background.call(self._source.pause())

    def send(self, bucket: Bucket) -> Future[None]:
        """The transfer goes on while the caller makes the next bucket meanwhile."""
        return self._background.start(self._source.send(bucket))

    def finish(self) -> UpdateOutcome:
        return self._background.call(self._source.finish())
