"""Rank 0's side of the house: the buffer, the rendezvous and the engines, on an event loop in a thread of its own.

The training loop is plain, blocking code; heartbeats must go on while it computes. So everything that talks runs on
this loop, and the training loop calls it through `wait`.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

from sluice.api import RLJobSpec
from sluice.engines import engine_of
from sluice.engines.base import Layout, StackName
from sluice.environment import Environment
from sluice.sample import SampleGroup
from sluice.telemetry import logs
from sluice.telemetry.books import Totals
from sluice.wire import codec, membership, rpc
from sluice.wire.locate import BufferLocator
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc, rendezvous_pb2, rendezvous_pb2_grpc
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.ipc import Ipc, beside
from sluice_trainer.weights.publisher import Published, Publisher, share
from sluice_trainer.weights.transport import Collective, Disk, Nothing, Transport

T = TypeVar("T")
CALL_SECONDS = 60.0
PATIENCE_SECONDS = 600.0
POLL_SECONDS = 1.0
STOP_SECONDS = 5.0
ENGINE_START_SECONDS = 1500.0
_TICK_SECONDS = 0.5
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Stopped(Exception):  # noqa: N818 - not an error
    """The trainer was asked to stop. What is trained is saved, or will be trained again from the same samples."""


class Coordinator:
    """Every method blocks, has a deadline, and may be called again after a failure of its peer."""

    def __init__(self, env: Environment, spec: RLJobSpec, stop: threading.Event, *, rank: int = 0) -> None:
        """stop: set by SIGTERM. From then on no absent peer is waited for longer than STOP_SECONDS."""
        self._stop = stop
        self._env = env
        self._spec = spec
        self._rank = rank
        self._caller = pb.Caller(name=env.name, attempt=env.attempt)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="coordinator", daemon=True)
        self._thread.start()
        self._state = ("starting", time.time())
        self._version = -1
        self._buffer = BufferLocator(env.rendezvous)
        self._call(self._open())

    def _call(self, coroutine: Coroutine[Any, Any, T], *, stoppable: bool = False) -> T:
        """The result of a coroutine on the loop. stoppable: raises Stopped where it still waits long after SIGTERM."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        give_up = math.inf
        while stoppable and not wait([future], timeout=_TICK_SECONDS).done:
            if self._stop.is_set():
                give_up = min(give_up, time.monotonic() + STOP_SECONDS)
            if time.monotonic() > give_up:
                future.cancel()
                raise Stopped
        return future.result()

    async def _open(self) -> None:
        address = self._env.rendezvous
        self._membership = await membership.Membership(address, self._hello, self._heartbeat).__aenter__()
        self._rendezvous_channel = rpc.channel(address)
        stub = rendezvous_pb2_grpc.RendezvousStub(self._rendezvous_channel)
        self._rendezvous = stub
        colocated, sync = self._spec.trainer.colocate, self._spec.weight_sync
        resolved = {"transport": self._transport_kind} | ({"pause_mode": "abort"} if colocated else {})
        self._publisher = Publisher(
            stub,
            (self._env.name, self._env.attempt),
            sync.model_copy(update=resolved),
            self._transport(),
            engine_of(self._spec),
            colocated=colocated,
        )

    @property
    def _transport_kind(self) -> str:
        return self._spec.transport(one_machine=self._env.advertise in _LOOPBACK)

    @property
    def layout(self) -> Layout:
        """What the engines want of tensors."""
        return engine_of(self._spec).layout

    @property
    def stack_name(self) -> StackName | None:
        """Engines' names for all experts of a layer as one tensor; None: they get each by its name in Hugging Face's
        files, as a directory has them.
        """
        stacked = self.layout.takes_stacks(self._spec) and self._transport_kind != "disk"
        return self.layout.stack_name if stacked else None

    def _transport(self) -> Transport:
        sync, kind = self._spec.weight_sync, self._transport_kind
        if self._spec.debug.rollout_only:
            return Nothing()
        if kind == "disk":
            directory = self._env.directory("checkpoint_dir") / "weights"
            return Disk(directory, Path(self._spec.model.path), self._env.attempt)
        if kind == "ipc":
            return Ipc()
        return Collective(
            kind, self._env.advertise, sync.timeout_seconds, f"{self._env.name}-{self._env.attempt}-{self._rank}"
        )

    def close(self) -> None:
        async def shut() -> None:
            await self._membership.__aexit__()
            await self._publisher.close()
            await self._rendezvous_channel.close()
            await self._buffer.close()

        self._call(shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    # --- who we are

    def unready(self) -> str:
        """Why this rank cannot train yet, in words; empty: it has joined. What comes later is told by its progress."""
        return "" if self._membership.latest else "not joined: the rendezvous does not answer"

    def _hello(self) -> rendezvous_pb2.Member:
        return rendezvous_pb2.Member(
            role="trainer",
            name=self._env.name,
            attempt=self._env.attempt,
            index=self._rank,
            address=self._env.advertise,
        )

    def _heartbeat(self) -> rendezvous_pb2.Heartbeat:
        state, since = self._state
        return rendezvous_pb2.Heartbeat(state=state, version=max(self._version, 0), gauges={"since": since})

    def state(self, word: str) -> None:
        """What the trainer is doing, in one word, for people who watch."""
        self._state = (word, time.time())
        self._loop.call_soon_threadsafe(self._membership.beat)

    # --- the buffer

    def _ask(
        self,
        what: str,
        request: Callable[[buffer_pb2_grpc.BufferStub], Awaitable[T]],
        seconds: float = PATIENCE_SECONDS,
    ) -> T:
        async def once() -> T:
            stub = await self._buffer.stub(seconds)
            try:
                return await request(stub)
            except grpc.aio.AioRpcError:
                self._buffer.lost(stub)
                raise

        return self._call(rpc.retrying(once, what=f"{what} at the buffer", seconds=seconds), stoppable=True)

    def rewind(self, step: int) -> int:
        """Tell the buffer where we start. Answers how many later steps have their batch already."""
        request = pb.RewindRequest(trainer=self._caller, step=step)
        answer: pb.RewindResponse = self._ask(
            "Rewind", lambda s: s.Rewind(request, metadata=rpc.metadata(), timeout=CALL_SECONDS)
        )
        return int(answer.replay_steps)

    def total_steps(self) -> int:
        """Steps of the whole job: the buffer knows how many an epoch has."""
        return int(self._stats().total_steps)

    def committed_step(self) -> int:
        """The last step that was committed."""
        return int(self._stats().step)

    def counters(self) -> dict[str, int]:
        """What the buffer has counted since the job began."""
        return dict(self.totals().counters)

    def totals(self) -> Totals:
        """What the buffer has counted since the job began, groups that failed by reason besides."""
        stats = self._stats()
        return Totals.of(stats.counters, stats.failed)

    def _stats(self) -> pb.BufferStats:
        stats: pb.BufferStats = self._ask(
            "Stats", lambda s: s.Stats(pb.StatsRequest(), metadata=rpc.metadata(), timeout=CALL_SECONDS)
        )
        return stats

    def try_take(self, step: int, data_parallel_size: int) -> pb.TakeBatchResponse:
        """The batch of a step, or the word that it is not there yet, after at most POLL_SECONDS."""
        request = pb.TakeBatchRequest(
            trainer=self._caller, step=step, data_parallel_size=data_parallel_size, wait_seconds=POLL_SECONDS
        )
        answer: pb.TakeBatchResponse = self._ask(
            "TakeBatch", lambda s: s.TakeBatch(request, metadata=rpc.metadata(), timeout=CALL_SECONDS)
        )
        return answer

    def shard(self, step: int, rank: int, data_parallel_size: int) -> list[SampleGroup]:
        """This rank's samples."""
        request = pb.GetShardRequest(trainer=self._caller, step=step, rank=rank, data_parallel_size=data_parallel_size)

        async def read(stub: buffer_pb2_grpc.BufferStub) -> list[SampleGroup]:
            chunks = stub.GetShard(request, metadata=rpc.metadata(), timeout=PATIENCE_SECONDS)
            return [group async for group in _groups(chunks)]

        return self._ask("GetShard", read)

    def commit_step(self, step: int, metrics: dict[str, float]) -> None:
        request = pb.CommitStepRequest(trainer=self._caller, step=step, version=step, metrics=metrics)
        self._ask("CommitStep", lambda s: s.CommitStep(request, metadata=rpc.metadata(), timeout=CALL_SECONDS))

    def commit_checkpoint(self, step: int) -> None:
        request = pb.CommitCheckpointRequest(trainer=self._caller, step=step)
        self._ask(
            "CommitCheckpoint", lambda s: s.CommitCheckpoint(request, metadata=rpc.metadata(), timeout=CALL_SECONDS)
        )

    def examples(self, version: int, dataset: str) -> list[SampleGroup]:
        """The groups of an evaluation that are kept for people to look at."""
        request = pb.GetExamplesRequest(version=version, dataset=dataset)

        async def read(stub: buffer_pb2_grpc.BufferStub) -> list[SampleGroup]:
            chunks = stub.GetExamples(request, metadata=rpc.metadata(), timeout=PATIENCE_SECONDS)
            return [group async for group in _groups(chunks)]

        return self._ask("GetExamples", read)

    def failures(self, after: int) -> list[pb.Failure]:
        """Groups that failed for good, after the one with serial number `after`; a limited number of them."""
        request = pb.GetFailuresRequest(after=after)
        answer: pb.GetFailuresResponse = self._ask(
            "GetFailures", lambda s: s.GetFailures(request, metadata=rpc.metadata(), timeout=CALL_SECONDS)
        )
        return list(answer.failures)

    def evaluations(self, after: int, wait_for: int | None = None) -> pb.GetEvaluationsResponse:
        """Evaluations of versions after `after`; with `wait_for`, wait a little for that one."""
        request = pb.GetEvaluationsRequest(after_version=after)
        if wait_for is not None:
            request.wait_for_version, request.wait_seconds = wait_for, POLL_SECONDS
        answer: pb.GetEvaluationsResponse = self._ask(
            "GetEvaluations", lambda s: s.GetEvaluations(request, metadata=rpc.metadata(), timeout=CALL_SECONDS)
        )
        return answer

    # --- the engines

    def share(
        self, engines: Sequence[rendezvous_pb2.EngineMember], world_size: int
    ) -> list[rendezvous_pb2.EngineMember]:
        """The engines that this rank sends to. A directory has one writer; memory of a GPU is opened on that GPU."""
        if self._transport_kind == "ipc" and self._spec.on_gpu:
            return beside(engines, self._rank, self._spec.rollout.gpus_per_replica)
        return share(engines, self._rank, 1 if self._transport_kind == "disk" else world_size)

    def await_engines(self, count: int) -> None:
        """Colocated, before anything of ours is on a GPU: until so many engines have started, each alone on its GPUs.

        Who has not come in ENGINE_START_SECONDS is not waited for.
        """

        async def come() -> None:
            end = time.monotonic() + ENGINE_START_SECONDS
            while len(engines := await self._engines()) < count:
                if time.monotonic() > end:
                    logs.get().warning("engines are missing", came=len(engines), expected=count)
                    return
                await asyncio.sleep(POLL_SECONDS)

        self._call(come(), stoppable=True)

    def rest_engines(self) -> None:
        """Colocated: all engines give their GPUs' memory to the trainer; those that have already are left alone."""
        entries = self._call(self._engines(), stoppable=True)
        engines = [rendezvous_pb2.EngineMember(member=e.member, generation=e.generation) for e in entries]
        self._call(self._publisher.rest(self._version, engines))

    def plan_update(self, version: int, *, joiners_only: bool) -> rendezvous_pb2.UpdatePlan:
        """Rank 0: fix who takes part in the update to `version`; the plan goes to every rank."""
        self._version = version
        return self._call(self._publisher.plan(version, joiners_only=joiners_only), stoppable=True)

    def keep_engines(self, engines: Sequence[rendezvous_pb2.EngineMember]) -> None:
        """Give up what is open towards all engines but these, which are this rank's share of all there are."""
        self._call(self._publisher.keep(engines))

    def prepare_update(self, version: int, engines: Sequence[rendezvous_pb2.EngineMember]) -> None:
        """Begin to bring `version` to this rank's share of the engines."""
        self._call(self._publisher.prepare(version, engines))

    def pause_engines(self) -> None:
        self._call(self._publisher.pause())

    def send(self, bucket: Bucket) -> Future[None]:
        """The transfer goes on beside the caller, who makes the next bucket meanwhile."""
        return asyncio.run_coroutine_threadsafe(self._publisher.send(bucket), self._loop)

    def finish_update(self) -> Published:
        return self._call(self._publisher.finish())

    def joiners(self) -> bool:
        """True where an engine waits for weights."""
        request = rendezvous_pb2.GetLedgerRequest(joiners_to=self._version)
        return bool(self._call(self._engines(request), stoppable=True))

    def evaluation_progress(self) -> tuple[int, float]:
        """What grows while an evaluation goes on: groups that are finished, and tokens that engines have generated."""
        engines = self._call(self._engines(), stoppable=True)
        return self.counters().get("evaluation_groups", 0), sum(e.gauges["generated_tokens"] for e in engines)

    async def _engines(
        self, request: rendezvous_pb2.GetLedgerRequest | None = None
    ) -> list[rendezvous_pb2.LedgerEntry]:
        """What the rendezvous has about each engine: about its first pod, which serves HTTP."""
        asked = request or rendezvous_pb2.GetLedgerRequest()

        async def ask() -> rendezvous_pb2.Ledger:
            ledger: rendezvous_pb2.Ledger = await self._rendezvous.GetLedger(
                asked, metadata=rpc.metadata(), timeout=CALL_SECONDS
            )
            return ledger

        ledger = await rpc.retrying(ask, what="GetLedger at the rendezvous", seconds=PATIENCE_SECONDS)
        return [e for e in ledger.entries if e.member.role == "rollout" and e.member.index == 0]


async def _groups(chunks: AsyncIterator[common.Chunk]) -> AsyncIterator[SampleGroup]:
    assembler = codec.Assembler()
    async for chunk in chunks:
        data = assembler.add(chunk)
        if data is not None:
            yield codec.group_from_message(common.SampleGroup.FromString(data))
