"""The trainer's client of the buffer: batches, commits, evaluations, totals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from sluice.images.image import Image
from sluice.runtime.pod_env import Environment
from sluice.samples.sample import SampleGroup
from sluice.telemetry.group_accounting import Totals
from sluice.wire import codec, rpc
from sluice.wire.buffer_locator import BufferLocator
from sluice.wire.image_client import ImageClient
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.clients.background import Background

T = TypeVar("T")
CALL_SECONDS = 60.0
PATIENCE_SECONDS = 600.0
POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Balance:
    """The cost of a sequence of n tokens, by which a batch is split between ranks.

    Attributes
    ----------
    tokens
        n0 of the cost n (1 + n / n0); 0: the cost is the number of tokens.
    image_cost
        Further cost of a token of an image, which passes a vision tower.

    """

    tokens: float = 0.0
    image_cost: float = 0.0


BY_TOKENS = Balance()


class BufferClient:
    """Blocking calls of the buffer, each with a deadline and retries.

    A call may be repeated after a failure of the buffer. It raises `Stopped` if the buffer is
    unreachable and the trainer was told to stop.

    Parameters
    ----------
    env
        Environment of the pod.
    background
        Runs the calls.
    balance
        Cost of a sequence, by which a batch is split between ranks.

    """

    def __init__(
        self, env: Environment, background: Background, balance: Balance = BY_TOKENS
    ) -> None:
        self._background = background
        self._balance = balance
        self._caller = pb.Caller(name=env.name, attempt=env.attempt)
        self._buffer = BufferLocator(env.rendezvous)
        self._images = ImageClient(self._buffer)

    def close(self) -> None:
        self._background.call(self._buffer.close())

    def _call(
        self,
        method: str,
        request: Callable[[buffer_pb2_grpc.BufferStub], Awaitable[T]],
        seconds: float = PATIENCE_SECONDS,
    ) -> T:
        async def attempt() -> T:
            stub = await self._buffer.stub(seconds)
            try:
                return await request(stub)
            except grpc.aio.AioRpcError:
                self._buffer.lost(stub)
                raise

        retrying = rpc.retrying(attempt, what=f"{method} at the buffer", seconds=seconds)
        return self._background.call(retrying, stoppable=True)

    def rewind(self, step: int, vocabulary: int | None = None) -> int:
        """Tell the buffer after which step training starts.

        Parameters
        ----------
        step
            Step of the loaded checkpoint; 0: the start of the run.
        vocabulary
            Rows of the model's embedding; None: not known.

        Returns
        -------
        Number of later steps whose batch the buffer already has.

        """
        request = pb.RewindRequest(trainer=self._caller, step=step, vocab_size=vocabulary or 0)
        answer: pb.RewindResponse = self._call(
            "Rewind", lambda s: s.Rewind(request, metadata=rpc.metadata(), timeout=CALL_SECONDS)
        )
        return int(answer.replay_steps)

    def total_steps(self) -> int:
        """Return the steps of the whole job, which the buffer computes from its epochs."""
        return int(self._stats().total_steps)

    def committed_step(self) -> int:
        """Return the last step that was committed."""
        return int(self._stats().step)

    def counters(self) -> dict[str, int]:
        """Return the buffer's counters since the start of the job."""
        return dict(self.totals().counters)

    def totals(self) -> Totals:
        """Return the counters since the start of the job, and the failed groups by reason."""
        stats = self._stats()
        return Totals.from_counters(stats.counters, stats.failed)

    def _stats(self) -> pb.BufferStats:
        stats: pb.BufferStats = self._call(
            "Stats",
            lambda s: s.Stats(pb.StatsRequest(), metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )
        return stats

    def try_take(self, step: int, data_parallel_size: int) -> pb.TakeBatchResponse:
        """Ask for the batch of a step; wait at most POLL_SECONDS for it."""
        request = pb.TakeBatchRequest(
            trainer=self._caller,
            step=step,
            data_parallel_size=data_parallel_size,
            wait_seconds=POLL_SECONDS,
            balance_tokens=self._balance.tokens,
            image_cost=self._balance.image_cost,
        )
        answer: pb.TakeBatchResponse = self._call(
            "TakeBatch",
            lambda s: s.TakeBatch(request, metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )
        return answer

    def shard(self, step: int, rank: int, data_parallel_size: int) -> list[SampleGroup]:
        """Return the samples of a data-parallel rank in the batch of a step."""
        request = pb.GetShardRequest(
            trainer=self._caller,
            step=step,
            rank=rank,
            data_parallel_size=data_parallel_size,
            balance_tokens=self._balance.tokens,
            image_cost=self._balance.image_cost,
        )

        async def read(stub: buffer_pb2_grpc.BufferStub) -> list[SampleGroup]:
            chunks = stub.GetShard(request, metadata=rpc.metadata(), timeout=PATIENCE_SECONDS)
            return [group async for group in _groups(chunks)]

        return self._call("GetShard", read)

    def images(self, digests: Sequence[str]) -> list[Image]:
        """Return images that samples refer to, in the order of their digests."""
        return self._background.call(self._images.get(digests), stoppable=True)

    def commit_step(self, step: int, metrics: dict[str, float]) -> None:
        """Tell the buffer that a step is trained, and its metrics."""
        request = pb.CommitStepRequest(
            trainer=self._caller, step=step, version=step, metrics=metrics
        )
        self._call(
            "CommitStep",
            lambda s: s.CommitStep(request, metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )

    def commit_checkpoint(self, step: int) -> None:
        """Tell the buffer that a checkpoint is durable and covers all steps up to `step`."""
        request = pb.CommitCheckpointRequest(trainer=self._caller, step=step)
        self._call(
            "CommitCheckpoint",
            lambda s: s.CommitCheckpoint(request, metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )

    def examples(self, version: int, dataset: str) -> list[SampleGroup]:
        """Return the groups of an evaluation that are kept for people to look at."""
        request = pb.GetExamplesRequest(version=version, dataset=dataset)

        async def read(stub: buffer_pb2_grpc.BufferStub) -> list[SampleGroup]:
            chunks = stub.GetExamples(request, metadata=rpc.metadata(), timeout=PATIENCE_SECONDS)
            return [group async for group in _groups(chunks)]

        return self._call("GetExamples", read)

    def held_out(self, dataset: int, first: int) -> list[SampleGroup]:
        """Return a page of rows of `evaluation.heldOut`; none after the end of the data set."""
        request = pb.GetHeldOutRequest(dataset=dataset, first=first)

        async def read(stub: buffer_pb2_grpc.BufferStub) -> list[SampleGroup]:
            chunks = stub.GetHeldOut(request, metadata=rpc.metadata(), timeout=PATIENCE_SECONDS)
            return [group async for group in _groups(chunks)]

        return self._call("GetHeldOut", read)

    def failures(self, after: int) -> list[pb.Failure]:
        """Return a limited number of groups that failed for good, after serial number `after`."""
        request = pb.GetFailuresRequest(after=after)
        answer: pb.GetFailuresResponse = self._call(
            "GetFailures",
            lambda s: s.GetFailures(request, metadata=rpc.metadata(), timeout=CALL_SECONDS),
        )
        return list(answer.failures)

    def evaluations(self, after: int, wait_for: int | None = None) -> pb.GetEvaluationsResponse:
        """Return the evaluations of versions after `after`; wait briefly for version `wait_for`."""
        request = pb.GetEvaluationsRequest(after_version=after)
        if wait_for is not None:
            request.wait_for_version, request.wait_seconds = wait_for, POLL_SECONDS
        answer: pb.GetEvaluationsResponse = self._call(
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
