"""The buffer's gRPC service: it converts messages and waits."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from sluice.telemetry import tracing
from sluice.wire.codec import to_chunks
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc, common_pb2
from sluice_buffer.core import Buffer
from sluice_buffer.errors import (
    CallError,
    InvalidCallError,
    PreconditionError,
    SilentSenderError,
    StaleAttemptError,
)
from sluice_buffer.group import GroupKey, parse_lease_id
from sluice_buffer.rules.balance import CostModel
from sluice_buffer.serving import metrics
from sluice_buffer.serving.budget import Budget
from sluice_buffer.serving.committer import Committer
from sluice_buffer.serving.images import (
    ROWS_AT_ONCE,
    LeaseImages,
    UnknownImagesError,
    heads_of,
    received_images,
    sent_images,
)
from sluice_buffer.serving.ingest import GroupReceiver
from sluice_buffer.serving.lease_queue import LeaseQueue
from sluice_buffer.serving.readback import (
    GrantedLease,
    evaluations,
    example_sizes,
    failures,
    granted_lease,
    lease_chunks,
    shard_chunks,
)
from sluice_buffer.serving.traces import GroupTraces
from sluice_buffer.sources.answers import Answers
from sluice_buffer.state.storage import StorageError, StorageFullError, value_key
from sluice_buffer.transitions.leases import LOCAL_WORKER, LeaseCall, WorkerAttempt
from sluice_buffer.transitions.submits import SubmitAnswer, SubmitOutcome

T = TypeVar("T")
MAX_WAIT_SECONDS = 300.0
# A page of held-out rows ends at one of these: with the row that reaches the bytes.
HELD_OUT_ROWS, HELD_OUT_BYTES = 256, 8 << 20
_PREPARE_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,199}")
_SHOWN_CHARACTERS = 80
_OUTCOMES = {
    SubmitOutcome.STORED: pb.SubmitResponse.OUTCOME_STORED,
    SubmitOutcome.DUPLICATE: pb.SubmitResponse.OUTCOME_DUPLICATE,
    SubmitOutcome.FILTERED: pb.SubmitResponse.OUTCOME_FILTERED,
    SubmitOutcome.STALE: pb.SubmitResponse.OUTCOME_STALE,
    SubmitOutcome.REFUSED: pb.SubmitResponse.OUTCOME_REFUSED,
}
_CODES: dict[type[Exception], grpc.StatusCode] = {
    StaleAttemptError: grpc.StatusCode.FAILED_PRECONDITION,
    PreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidCallError: grpc.StatusCode.INVALID_ARGUMENT,
    SilentSenderError: grpc.StatusCode.DEADLINE_EXCEEDED,
    StorageFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StorageError: grpc.StatusCode.UNAVAILABLE,
    UnknownImagesError: grpc.StatusCode.NOT_FOUND,
}
ServicerContext: TypeAlias = grpc.aio.ServicerContext
_WAITING = pb.TakeBatchResponse.STATE_WAITING


@dataclass(frozen=True)
class _BatchState:
    """The state of a batch that the trainer asks for."""

    waiting_for: str
    state: pb.TakeBatchResponse.State = _WAITING
    # True if enough groups have finished, but the batch waits for groups that would become too old.
    late: bool = False


@dataclass
class _BatchRequest:
    """A step's batch since it was first asked for, and the time for which it was late."""

    step: int = 0
    since: float = field(default_factory=time.monotonic)
    late_seconds: float = 0.0
    late_since: float | None = None

    def note(self, late: bool) -> None:
        now = time.monotonic()
        if self.late_since is not None:
            self.late_seconds += now - self.late_since
        self.late_since = now if late else None


class Service(buffer_pb2_grpc.BufferServicer):  # type: ignore[misc]
    """The calls of protos/sluice/v1/buffer.proto."""

    def __init__(self, committer: Committer, budget: Budget) -> None:
        self.committer, self.budget = committer, budget
        self.lease_queue = LeaseQueue(committer.buffer)
        self.lease_images = LeaseImages(committer, budget)
        committer.landed_hooks.append(self.lease_queue.call_up)
        self.traces = GroupTraces(committer.buffer) if tracing.enabled() else None
        self._batch_request = _BatchRequest()
        # Step whose batch was last handed out.
        self._last_batch_step = 0

    @property
    def buffer(self) -> Buffer:
        return self.committer.buffer

    async def _run(self, context: ServicerContext, transition: Callable[[], T]) -> T:
        """Run a transition and wait until it is durable; a refusal becomes the call's status."""
        try:
            with metrics.TRANSITION_SECONDS.time():
                return await self.committer.run(transition)
        except (CallError, StorageError) as error:
            await context.abort(_CODES[type(error)], str(error))
            raise AssertionError("abort raises") from error

    async def _until(
        self, seconds: float, attempt: Callable[[], Awaitable[T]], ready: Callable[[T], bool]
    ) -> T:
        """Repeat `attempt` after each change of the buffer, until it is ready or time is up."""
        end = time.monotonic() + min(max(seconds, 0.0), MAX_WAIT_SECONDS)
        while True:
            seen = self.committer.changes
            result = await attempt()
            left = end - time.monotonic()
            if ready(result) or left <= 0:
                return result
            await self.committer.changed(seen, min(left, 1.0))

    # -- workers

    async def LeasePrompts(
        self, request: pb.LeasePromptsRequest, context: ServicerContext
    ) -> AsyncIterator[pb.LeasePromptsResponse]:
        worker = await _worker(request.worker, context)
        held = frozenset(lease.lease_id for lease in request.held)
        call = LeaseCall(worker, request.request, held, request.session)
        seconds = min(max(request.wait_seconds, 0.0), MAX_WAIT_SECONDS)
        with metrics.LEASE_WAIT_SECONDS.time():
            keys = await self.lease_queue.lease(
                call, request.max_groups, request.version, seconds, partial(self._run, context)
            )
        if self.buffer.prompts.have_images:
            leases = self._leases_with_images(keys, context)
        else:
            leases = _as_async([granted_lease(self.buffer, key) for key in keys])
        number = 0
        async for lease in leases:
            number += 1
            async with self.budget.reserved(lease.size):
                for chunk in await asyncio.to_thread(lease_chunks, self.buffer, lease, number):
                    yield pb.LeasePromptsResponse(group=chunk)
        yield pb.LeasePromptsResponse(exhausted=not keys and self.buffer.over)

    async def _leases_with_images(
        self, keys: list[GroupKey], context: ServicerContext
    ) -> AsyncIterator[GrantedLease]:
        """Yield leases that were just granted, each once its images are stored."""
        granted = [(key, self.buffer.memory.find(key)) for key in keys]
        attempts = [(key, group.lease_attempt) for key, group in granted if group]
        try:
            for start in range(0, len(attempts), ROWS_AT_ONCE):
                part = attempts[start : start + ROWS_AT_ONCE]
                for lease in await asyncio.gather(*starmap(self.lease_images.read, part)):
                    if lease is not None:
                        yield lease
        except (CallError, StorageError) as error:
            await context.abort(_CODES[type(error)], str(error))

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: ServicerContext
    ) -> pb.HeartbeatResponse:
        worker = await _worker(request.worker, context)
        names = [(lease.lease_id, parse_lease_id(lease.lease_id)) for lease in request.leases]
        drop = set(await self._run(context, lambda: self.buffer.heartbeat(worker, names)))
        return pb.HeartbeatResponse(
            drop=[lease for lease in request.leases if lease.lease_id in drop]
        )

    async def Submit(
        self, requests: AsyncIterator[common_pb2.Chunk], context: ServicerContext
    ) -> None:
        def answer(key: int, result: SubmitAnswer) -> pb.SubmitResponse:
            return pb.SubmitResponse(
                key=key, outcome=_OUTCOMES[result.outcome], message=result.message
            )

        await self._receive_groups(
            context,
            "submit",
            self.buffer.submit,
            answer,
            lambda why: SubmitAnswer(SubmitOutcome.REFUSED, why),
        )

    async def Return(
        self, requests: AsyncIterator[common_pb2.Chunk], context: ServicerContext
    ) -> None:
        def answer(key: int, result: tuple[bool, str]) -> pb.ReturnResponse:
            return pb.ReturnResponse(key=key, accepted=result[0], message=result[1])

        await self._receive_groups(
            context, "return", self.buffer.give_back, answer, lambda why: (False, why)
        )

    async def _receive_groups(
        self, context: ServicerContext, call: str, take: Any, answer: Any, refuse: Any
    ) -> None:
        seconds = metrics.TAKE_SECONDS.labels(call)
        receiver = GroupReceiver(
            self.committer, self.budget, context, take, answer, refuse, seconds
        )
        failure = await receiver.serve()
        if failure is not None:
            await context.abort(_CODES[type(failure)], str(failure))

    # -- trainer

    async def TakeBatch(
        self, request: pb.TakeBatchRequest, context: ServicerContext
    ) -> pb.TakeBatchResponse:
        step, attempt = request.step, request.trainer.attempt
        ranks = await _ranks(request.data_parallel_size, context)
        if self._batch_request.step != step:
            self._batch_request = _BatchRequest(step)
        batch_request = self._batch_request

        async def take() -> _BatchState:
            if not await self._is_prepared(step):
                return _BatchState("the rows of the batch are being encoded")
            taken = await self._run(context, lambda: self._take(step, attempt))
            batch_request.note(taken.late)
            return taken

        taken = await self._until(request.wait_seconds, take, lambda t: t.state != _WAITING)
        answer = pb.TakeBatchResponse(
            step=step,
            wait_time_seconds=time.monotonic() - batch_request.since,
            late_seconds=batch_request.late_seconds,
            checkpoint_wanted=self.buffer.capacity.checkpoint_wanted(),
        )
        answer.state, answer.waiting_for = taken.state, taken.waiting_for
        if taken.state == pb.TakeBatchResponse.STATE_READY:
            if self._last_batch_step != step:
                self._last_batch_step = step
                metrics.BATCH_WAIT_SECONDS.observe(answer.wait_time_seconds)
            answer.sequences.extend(self.buffer.sequences(step, ranks, _cost(request)))
        return answer

    def _take(self, step: int, attempt: int) -> _BatchState:
        """Take the batch, or say why it is not complete. A transition.

        Both answers are sent once they are durable: a trainer that hears that the job is given up
        reads the failures that led to it from the disk.
        """
        waiting = self.buffer.take(step, attempt)
        if waiting is None:
            return _BatchState("", pb.TakeBatchResponse.STATE_READY)
        if failed := self.buffer.dead_end():
            return _BatchState(failed, pb.TakeBatchResponse.STATE_FAILED)
        exhausted = self.buffer.batches.exhausted
        state = pb.TakeBatchResponse.STATE_EXHAUSTED if exhausted else _WAITING
        late = self.buffer.batches.late(step)
        return _BatchState(self.buffer.waiting_for() or waiting, state, late)

    async def _is_prepared(self, step: int) -> bool:
        """Wait a moment for the preparation of a batch, while other calls are answered.

        False if it takes longer.
        """
        ahead = self.buffer.prepare(step)
        if ahead is not None:
            await asyncio.wait([asyncio.wrap_future(ahead)], timeout=_PREPARE_SECONDS)
        return ahead is None or ahead.done()

    async def GetShard(
        self, request: pb.GetShardRequest, context: ServicerContext
    ) -> AsyncIterator[common_pb2.Chunk]:
        ranks = await _ranks(request.data_parallel_size, context)
        if not 0 <= request.rank < ranks:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"rank {request.rank} of {ranks}")
        waiting = await self._run(
            context, lambda: self.buffer.take(request.step, request.trainer.attempt)
        )
        if waiting is not None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"batch {request.step} is not fixed: {waiting}"
            )
        shard: dict[int, list[tuple[int, bool]]] = {}
        for sequence in self.buffer.sequences(request.step, ranks, _cost(request)):
            if sequence.rank == request.rank:
                failed = sequence.status == common_pb2.SAMPLE_STATUS_FAILED
                shard.setdefault(sequence.group_id, []).append((sequence.index, failed))
        for number, (group_id, samples) in enumerate(shard.items()):
            async with self.budget.reserved(self.buffer.memory.groups[group_id].size):
                for chunk in await asyncio.to_thread(
                    shard_chunks, self.buffer.storage, group_id, samples, number
                ):
                    yield chunk

    async def CommitStep(
        self, request: pb.CommitStepRequest, context: ServicerContext
    ) -> pb.CommitStepResponse:
        record = dict(request.metrics)
        attempt = request.trainer.attempt
        await self._run(
            context, lambda: self.buffer.commit(request.step, request.version, attempt, record)
        )
        if self.traces:
            self.traces.committed(request.step)
        return pb.CommitStepResponse()

    async def CommitCheckpoint(
        self, request: pb.CommitCheckpointRequest, context: ServicerContext
    ) -> pb.CommitCheckpointResponse:
        attempt = request.trainer.attempt
        forgotten = await self._run(
            context, lambda: self.buffer.commit_checkpoint(request.step, attempt)
        )
        return pb.CommitCheckpointResponse(forgotten_groups=forgotten)

    async def Rewind(
        self, request: pb.RewindRequest, context: ServicerContext
    ) -> pb.RewindResponse:
        replay = await self._run(
            context,
            lambda: self.buffer.rewind(request.step, request.trainer.attempt, request.vocab_size),
        )
        return pb.RewindResponse(replay_steps=replay)

    async def GetEvaluations(
        self, request: pb.GetEvaluationsRequest, context: ServicerContext
    ) -> pb.GetEvaluationsResponse:
        async def pending() -> list[int]:
            return await self._run(context, lambda: sorted(self.buffer.memory.rounds))

        def ready(versions: list[int]) -> bool:
            return (
                not request.HasField("wait_for_version") or request.wait_for_version not in versions
            )

        versions = await self._until(request.wait_seconds, pending, ready)
        return pb.GetEvaluationsResponse(
            evaluations=evaluations(self.buffer, request.after_version),
            pending_versions=versions,
        )

    async def GetExamples(
        self, request: pb.GetExamplesRequest, context: ServicerContext
    ) -> AsyncIterator[common_pb2.Chunk]:
        for number, (key, size) in enumerate(
            example_sizes(self.buffer, request.version, request.dataset)
        ):
            async with self.budget.reserved(size):
                value = await asyncio.to_thread(
                    self.buffer.storage.value, "examples", value_key(key)
                )
                for chunk in to_chunks(number, value) if value else ():
                    yield chunk

    async def GetHeldOut(
        self, request: pb.GetHeldOutRequest, context: ServicerContext
    ) -> AsyncIterator[common_pb2.Chunk]:
        source, datasets = self.buffer.local_source, self.buffer.prompts.held_out
        problem = ""
        if not 0 <= request.dataset < len(datasets):
            problem = f"the job has no evaluation.heldOut[{request.dataset}]"
        elif request.first < 0:
            problem = f"rows are counted from 0, found {request.first}"
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        # Only jobs that learn from given answers have held-out rows.
        assert isinstance(source, Answers)
        end = min(request.first + HELD_OUT_ROWS, self.buffer.prompts.held_out_size(request.dataset))
        sent = 0
        for number, at in enumerate(range(request.first, end)):
            data = await asyncio.wrap_future(source.held_out(request.dataset, at))
            async with self.budget.reserved(len(data)):
                for chunk in to_chunks(number, data):
                    yield chunk
            sent += len(data)
            if sent >= HELD_OUT_BYTES:
                return

    async def GetFailures(
        self, request: pb.GetFailuresRequest, context: ServicerContext
    ) -> pb.GetFailuresResponse:
        page = failures(self.buffer.storage, self.buffer.prompts, request.after)
        return pb.GetFailuresResponse(failures=list(page))

    # -- any caller

    async def GetImages(
        self, request: pb.GetImagesRequest, context: ServicerContext
    ) -> AsyncIterator[common_pb2.Chunk]:
        try:
            heads = heads_of(self.buffer, request.digests)
            async for chunk in sent_images(self.buffer.storage, self.budget, heads):
                yield chunk
        except (CallError, UnknownImagesError) as error:
            await context.abort(_CODES[type(error)], str(error))

    async def PutImages(
        self, requests: AsyncIterator[common_pb2.Chunk], context: ServicerContext
    ) -> pb.PutImagesResponse:
        try:
            await received_images(context, self.committer, self.budget)
        except (CallError, StorageError) as error:
            await context.abort(_CODES[type(error)], str(error))
        return pb.PutImagesResponse()

    def stats(self) -> pb.BufferStats:
        stats, budget = metrics.stats(self.buffer), self.budget
        stats.under_way_bytes, stats.under_way_peak_bytes = budget.used, budget.peak
        stats.under_way_limit_bytes = budget.limit
        return stats

    async def Stats(self, request: pb.StatsRequest, context: ServicerContext) -> pb.BufferStats:
        return self.stats()


async def _as_async(values: Iterable[T]) -> AsyncIterator[T]:
    for value in values:
        yield value


async def _worker(caller: pb.Caller, context: ServicerContext) -> WorkerAttempt:
    if not _NAME.fullmatch(caller.name) or caller.name == LOCAL_WORKER.name:
        shown = ascii(caller.name[:_SHOWN_CHARACTERS])
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"worker.name: {shown} is not a name: expected at most 200 letters, digits, '-', '_' "
            f"and '.', and not {LOCAL_WORKER.name!r}, the buffer itself",
        )
    return WorkerAttempt(caller.name, caller.attempt)


async def _ranks(data_parallel_size: int, context: ServicerContext) -> int:
    if data_parallel_size < 1:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, f"data_parallel_size: {data_parallel_size} is below 1"
        )
    return data_parallel_size


def _cost(request: pb.TakeBatchRequest | pb.GetShardRequest) -> CostModel:
    return CostModel(request.balance_tokens, request.image_cost)
