"""The buffer as a trainer uses it: batches, commits, evaluations, books."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc.aio

from sluice.runtime.pod_env import Environment
from sluice.samples.sample import SampleGroup
from sluice.telemetry.group_accounting import Totals
from sluice.wire import codec, rpc
from sluice.wire.buffer_locator import BufferLocator
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.clients.background import Background

T = TypeVar("T")
CALL_SECONDS = 60.0
PATIENCE_SECONDS = 600.0
POLL_SECONDS = 1.0


class BufferClient:
    """Every method blocks, has a deadline, and may be called again after a failure of the buffer.
    It may raise Stopped: the buffer is away, and the trainer was told to end.
    """

    def __init__(
        self, env: Environment, background: Background, balance_tokens: float = 0.0
    ) -> None:
        """balance_tokens: n0 of a sequence's cost n (1 + n / n0), by which batches are shared out;
        0: its tokens.
        """
        self._background = background
        self._balance_tokens = balance_tokens
        self._caller = pb.Caller(name=env.name, attempt=env.attempt)
        self._buffer = BufferLocator(env.rendezvous)

    def close(self) -> None:
        self._background.call(self._buffer.close())

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

        asking = rpc.retrying(once, what=f"{what} at the buffer", seconds=seconds)
        return self._background.call(asking, stoppable=True)

    def rewind(self, step: int, vocabulary: int | None = None) -> int:
        """Tell the buffer where we start. Answers how many later steps have their batch already.

        vocabulary: tokens of the model's embedding; None: not known.
        """
        request = pb.RewindRequest(trainer=self._caller, step=step, vocab_size=vocabulary or 0)
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
        """The buffer's counters since the job began."""
        return dict(self.totals().counters)

    def totals(self) -> Totals:
        """The buffer's counters since the job began, and groups that failed by reason."""
        stats = self._stats()
        return Totals.of(stats.counters, stats.failed)

    def _stats(self) -> pb.BufferStats:
        stats: pb.BufferStats = self._ask(
            "Stats",
            lambda s: s.Stats(pb.StatsRequest(), metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )
        return stats

    def try_take(self, step: int, data_parallel_size: int) -> pb.TakeBatchResponse:
        """The batch of a step, or the word that it is not there yet, after at most POLL_SECONDS."""
        request = pb.TakeBatchRequest(
            trainer=self._caller,
            step=step,
            data_parallel_size=data_parallel_size,
            wait_seconds=POLL_SECONDS,
            balance_tokens=self._balance_tokens,
        )
        answer: pb.TakeBatchResponse = self._ask(
            "TakeBatch",
            lambda s: s.TakeBatch(request, metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )
        return answer

    def shard(self, step: int, rank: int, data_parallel_size: int) -> list[SampleGroup]:
        """This rank's samples."""
        request = pb.GetShardRequest(
            trainer=self._caller,
            step=step,
            rank=rank,
            data_parallel_size=data_parallel_size,
            balance_tokens=self._balance_tokens,
        )

        async def read(stub: buffer_pb2_grpc.BufferStub) -> list[SampleGroup]:
            chunks = stub.GetShard(request, metadata=rpc.metadata(), timeout=PATIENCE_SECONDS)
            return [group async for group in _groups(chunks)]

        return self._ask("GetShard", read)

    def commit_step(self, step: int, metrics: dict[str, float]) -> None:
        request = pb.CommitStepRequest(
            trainer=self._caller, step=step, version=step, metrics=metrics
        )
        self._ask(
            "CommitStep",
            lambda s: s.CommitStep(request, metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )

    def commit_checkpoint(self, step: int) -> None:
        request = pb.CommitCheckpointRequest(trainer=self._caller, step=step)
        self._ask(
            "CommitCheckpoint",
            lambda s: s.CommitCheckpoint(request, metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )

    def examples(self, version: int, dataset: str) -> list[SampleGroup]:
        """The groups of an evaluation that are kept for people to look at."""
        request = pb.GetExamplesRequest(version=version, dataset=dataset)

        async def read(stub: buffer_pb2_grpc.BufferStub) -> list[SampleGroup]:
            chunks = stub.GetExamples(request, metadata=rpc.metadata(), timeout=PATIENCE_SECONDS)
            return [group async for group in _groups(chunks)]

        return self._ask("GetExamples", read)

    def failures(self, after: int) -> list[pb.Failure]:
        """Groups that failed for good, after the one with serial number `after`; a limited number
        of them.
        """
        request = pb.GetFailuresRequest(after=after)
        answer: pb.GetFailuresResponse = self._ask(
            "GetFailures",
            lambda s: s.GetFailures(request, metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )
        return list(answer.failures)

    def evaluations(self, after: int, wait_for: int | None = None) -> pb.GetEvaluationsResponse:
        """Evaluations of versions after `after`; with `wait_for`, wait a little for that one."""
        request = pb.GetEvaluationsRequest(after_version=after)
        if wait_for is not None:
            request.wait_for_version, request.wait_seconds = wait_for, POLL_SECONDS
        answer: pb.GetEvaluationsResponse = self._ask(
            "GetEvaluations",
            lambda s: s.GetEvaluations(request, metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )
        return answer


async def _groups(chunks: AsyncIterator[common.Chunk]) -> AsyncIterator[SampleGroup]:
    assembler = codec.Assembler()
    async for chunk in chunks:
        data = assembler.add(chunk)
        if data is not None:
            yield codec.group_from_message(common.SampleGroup.FromString(data))
