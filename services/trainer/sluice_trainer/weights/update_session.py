"""Blocking calls of one rank's training loop that make up weight updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from sluice.api import RLJobSpec
from sluice.engines import engine_of
from sluice.engines.plugin_common import pool_credential
from sluice.engines.protocol import BaseModel, Layout, StackName
from sluice.model_digest import model_digest
from sluice.runtime.pod_env import ConfigurationError, Environment
from sluice.stores import StoreError, UriError
from sluice.telemetry import logs
from sluice.weight_store.objects import job_prefix, open_store
from sluice.weight_store.publisher import BASE, Publisher
from sluice.wire import rpc
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_trainer.clients.background import Background
from sluice_trainer.clients.membership import Member
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.lora import files as adapter_files
from sluice_trainer.model.quantize import quantized
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.chain import Chain
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.disk import AdapterFile, Disk, VersionDirectories, VersionOnly
from sluice_trainer.weights.ipc import Ipc, colocated_with
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.sender import WeightSender, share
from sluice_trainer.weights.stored_updates import StoredUpdates
from sluice_trainer.weights.transport import Transport

CALL_SECONDS = 60.0
PATIENCE_SECONDS = 600.0
POLL_SECONDS = 1.0
ENGINE_START_SECONDS = 1500.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class UpdateSession:
    """A trainer rank's side of all weight updates.

    Every method blocks, has a deadline, and may raise Stopped.
    """

    def __init__(
        self, env: Environment, spec: RLJobSpec, member: Member, rank: int, background: Background
    ) -> None:
        self._env, self._spec, self._rank = env, spec, rank
        self._member, self._background = member, background
        self._background.call(self._open())
        # The model's digest, which rank 0 computes while the trainer reads the same files.
        self._digest: Future[str] | None = None
        if rank == 0 and self._sends_adapter_alone:
            path = Path(spec.model.path)
            self._digest = background.start(asyncio.to_thread(model_digest, path))

    async def _open(self) -> None:
        self._channel = rpc.channel(self._env.rendezvous)
        self._rendezvous = rendezvous_pb2_grpc.RendezvousStub(self._channel)
        colocated, sync = self._spec.trainer.colocate, self._spec.weight_sync
        resolved = {"transport": self._transport_kind} | (
            {"pause_mode": "abort"} if colocated else {}
        )
        self._sender = WeightSender(
            self._rendezvous,
            (self._env.name, self._env.attempt),
            sync.model_copy(update=resolved),
            self._transport(),
            engine_of(self._spec),
            in_pool=self._spec.uses_pool,
            colocated=colocated,
            until_stopped=self._background.until_stopped,
        )
        self._stored_updates = self._stored()

    def close(self) -> None:
        async def shut() -> None:
            await self._sender.close()
            await self._channel.close()

        self._background.call(shut())

    @property
    def layout(self) -> Layout:
        """The layout of tensors that the engines want."""
        return engine_of(self._spec).layout

    @property
    def stack_name(self) -> StackName | None:
        """The engines' names for tensors that hold all experts of a layer.

        None if engines get each expert separately, under its Hugging Face name.
        """
        stacked = self.layout.takes_stacks(self._spec) and self._transport_kind not in (
            "disk",
            "store",
        )
        return self.layout.stack_name if stacked else None

    def in_precision(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Yield full tensors in the precision of the engines (`rollout.precision`)."""
        precision = self._spec.rollout.precision
        return tensors if precision == "bf16" else quantized(tensors, precision)

    @property
    def _transport_kind(self) -> str:
        return self._spec.transport(one_machine=self._env.advertise in _LOOPBACK)

    @property
    def _sends_adapter_alone(self) -> bool:
        return self._spec.weight_sync.lora == "adapter" and not self._spec.debug.rollout_only

    def _transport(self) -> Transport:
        sync, kind = self._spec.weight_sync, self._transport_kind
        if self._spec.debug.rollout_only or kind == "store":
            return VersionOnly()
        if kind == "disk":
            directory = self._env.directory("checkpoint_dir") / "weights"
            return self._in_files(VersionDirectories(directory, self._env.attempt))
        if kind == "ipc":
            return Ipc()
        direct = Collective(
            kind,
            self._env.advertise,
            sync.timeout_seconds,
            f"{self._env.name}-{self._env.attempt}-{self._rank}",
            tag=pool_credential.name_start(self._env.variables.get(pool_credential.VARIABLE, "")),
        )
        if sync.fan_out == "direct":
            return direct
        return Chain(direct)

    def _in_files(self, versions: VersionDirectories) -> Transport:
        """Return the transport that writes each version as files."""
        if self._sends_adapter_alone:
            return AdapterFile(versions)
        drawn = self._spec.model.init == "random"
        precision = self._spec.rollout.precision
        return Disk(versions, Path(self._spec.model.path), drawn=drawn, precision=precision)

    def _stored(self) -> StoredUpdates | None:
        """Return what publishes weights to the store, on rank 0; None if they are sent."""
        store = self._spec.weight_sync.store
        if store is None or self._spec.debug.rollout_only or self._rank:
            return None
        # On a laptop pods share this directory.
        directory = self._env.directory("weights_dir") / self._env.name
        versions = VersionDirectories(directory, self._env.attempt)
        try:
            objects = open_store(store.uri, job_prefix(self._env.job()))
        except (StoreError, UriError) as error:
            raise ConfigurationError(f"weightSync.store: {error}") from error
        publisher = Publisher(
            objects,
            self._env.attempt,
            directory / BASE,
            snapshot_every=store.snapshot_every,
            keep=store.keep,
            load=adapter_files.WEIGHTS if self._sends_adapter_alone else "",
        )
        return StoredUpdates(
            self._rendezvous,
            (self._env.name, self._env.attempt),
            versions,
            self._in_files(versions),
            publisher,
            self._spec.weight_sync.timeout_seconds,
        )

    # --- weights in a store

    @property
    def publishes(self) -> bool:
        """True if weights go to a store, from which engines fetch them."""
        return self._spec.weight_sync.store is not None and not self._spec.debug.rollout_only

    def write(self, bucket: Bucket, version: int) -> None:
        """Write a bucket of the version that `publish` publishes, on rank 0."""
        assert self._stored_updates
        self._background.call(self._stored_updates.write(bucket, version))

    def publish(self, version: int) -> UpdateOutcome:
        """Publish the version whose buckets are written, and tell the rendezvous, on rank 0."""
        assert self._stored_updates
        self._member.version = version
        digest = self._sender.base.digest if self._sender.base else ""
        return self._background.call(self._stored_updates.publish(version, digest))

    # --- before and between updates

    def await_engines(self, count: int) -> None:
        """Wait until `count` engines have started, in colocated mode.

        Call it before the trainer uses its GPUs, because each engine starts alone on its GPUs.
        Engines that have not started after ENGINE_START_SECONDS are not waited for.
        """

        async def come() -> None:
            end = time.monotonic() + ENGINE_START_SECONDS
            while len(engines := await self._engines()) < count:
                if time.monotonic() > end:
                    logs.get().warning(
                        "engines have not started", started=len(engines), expected=count
                    )
                    return
                await asyncio.sleep(POLL_SECONDS)

        self._background.call(come(), stoppable=True)

    def rest(self) -> None:
        """Have all engines release their GPU memory to the trainer, in colocated mode.

        Engines that have released it already are left alone.
        """
        entries = self._background.call(self._engines(), stoppable=True)
        engines = [pb.EngineMember(member=e.member, generation=e.generation) for e in entries]
        self._background.call(self._sender.rest(self._member.version, engines))

    def joiners(self) -> bool:
        """Return True if an engine waits for its first weights.

        With a store: True if the store has not taken the present version yet.
        """
        if self._stored_updates:
            announced = self._stored_updates.announced(self._member.version)
            return not self._background.call(announced, stoppable=True)
        request = pb.GetLedgerRequest(joiners_to=self._member.version)
        return bool(self._background.call(self._engines(request), stoppable=True))

    def generated_tokens(self) -> float:
        """Return the number of tokens that the present engines have generated since their start."""
        engines = self._background.call(self._engines(), stoppable=True)
        return float(sum(e.gauges["generated_tokens"] for e in engines))

    async def _engines(self, request: pb.GetLedgerRequest | None = None) -> list[pb.LedgerEntry]:
        """Return the rendezvous' entries of each engine's first pod, which serves HTTP."""
        ledger_request = request or pb.GetLedgerRequest()

        async def ask() -> pb.Ledger:
            ledger: pb.Ledger = await self._rendezvous.GetLedger(
                ledger_request, metadata=rpc.metadata(), timeout=CALL_SECONDS
            )
            return ledger

        ledger = await rpc.retrying(
            ask, what="GetLedger at the rendezvous", seconds=PATIENCE_SECONDS
        )
        return [e for e in ledger.entries if e.member.role == "rollout" and e.member.index == 0]

    # --- an update

    def plan(self, version: int, *, joiners_only: bool) -> pb.UpdatePlan:
        """Ask the rendezvous which engines take part in the update to `version`, on rank 0.

        The caller broadcasts the plan to every rank.
        """
        self._member.version = version
        return self._background.call(self._sender.plan(version, joiners_only=joiners_only))

    def shares(
        self, engines: Sequence[pb.EngineMember], world_size: int
    ) -> list[list[pb.EngineMember]]:
        """Return the engines that each rank sends to.

        A directory has a single writer. GPU memory is opened on the same GPU.
        """
        ranks = range(world_size)
        if self._transport_kind == "ipc" and self._spec.on_gpu:
            gpus = self._spec.rollout.gpus_per_replica
            return [colocated_with(engines, rank, gpus) for rank in ranks]
        senders = 1 if self._transport_kind == "disk" else world_size
        return [share(engines, rank, senders) for rank in ranks]

    def keep(self, engines: Sequence[pb.EngineMember]) -> None:
        """Close everything that is open to engines outside this rank's current share."""
        self._background.call(self._sender.keep(engines))

    def know_base(self, ranks: Ranks) -> None:
        """Have all ranks know the model of an adapter that is sent alone. Collective.

        Each rank compares it with the models of its engines. Once is enough.
        """
        if not self._sends_adapter_alone or self._sender.base is not None:
            return
        digest = ranks.broadcast(self._digest.result() if self._digest else "")
        self._sender.base = BaseModel(self._spec.model.path, digest)
        if self._rank == 0:
            logs.get().info("model of the adapter", path=self._spec.model.path, digest=digest)

    def prepare(self, version: int, engines: Sequence[pb.EngineMember]) -> Future[None]:
        """Begin to bring `version` to this rank's share of the engines, in the background."""
        return self._background.start(self._sender.prepare(version, engines))

    def pause(self) -> None:
        self._background.call(self._sender.pause())

    def send(self, bucket: Bucket) -> Future[None]:
        """Begin to send a bucket in the background, while the caller fills the next one."""
        return self._background.start(self._sender.send(bucket))

    def finish(self) -> UpdateOutcome:
        return self._background.call(self._sender.finish())
