"""The rollout worker: lease a prompt group, generate its samples at the engine beside, score them, submit.

The worker pulls, so that the load balances itself: an engine that is slow leases less. It leases only while the
rendezvous says that its engine holds weights that may be used.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Any

from sluice.api import EvaluationDataset, RLJobSpec
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.judge import Judge
from sluice.sample import Prompt, Purpose, Sample, SampleGroup, SampleStatus
from sluice.telemetry import logs
from sluice.wire import codec
from sluice.wire.membership import Membership
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout.buffer import BufferClient, Outbox
from sluice_rollout.engine import Engine, EngineError
from sluice_rollout.filters import Filter
from sluice_rollout.generate import Generator, sampling_params
from sluice_rollout.prompts import PromptEncoder, PromptTooLongError, source_name

LEASE_WAIT_SECONDS = 10.0
HEALTH_SECONDS = 5.0
UNHEALTHY_AFTER = 3
STALL_SECONDS = 60.0


class EngineLostError(Exception):
    """The engine cannot be used any more: this pod must be replaced."""


@dataclass(slots=True)
class Work:
    """One leased group."""

    prompt: Prompt
    partial: list[Sample]
    lease_seconds: float
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Worker:
    spec: RLJobSpec
    engine: Engine
    encoder: PromptEncoder
    generator: Generator
    judge: Judge
    keep: Filter
    buffer: BufferClient
    membership: Membership
    submits: Outbox
    returns: Outbox
    work: dict[str, Work] = field(default_factory=dict)
    exhausted: bool = False
    last_progress: float = field(default_factory=time.monotonic)
    finished_samples: int = 0
    generated_tokens: int = 0
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, then give everything back. EngineLostError where the engine is lost."""
        async with asyncio.TaskGroup() as group:
            helpers = [
                group.create_task(coroutine)
                for coroutine in (
                    self.submits.run(),
                    self.returns.run(),
                    self._heartbeats(),
                    self._watch_engine(),
                    self._watch_membership(),
                )
            ]
            leasing = group.create_task(self._lease_forever(group))
            await stop.wait()
            leasing.cancel()
            await self._drain()
            for task in helpers:
                task.cancel()

    # --- leasing

    async def _lease_forever(self, group: asyncio.TaskGroup) -> None:
        while True:
            await self._until_admitted()
            await self._until_room()
            latest = self.membership.latest
            answer = await self.buffer.lease(self._room_for(), latest.version if latest else -1, LEASE_WAIT_SECONDS)
            self.exhausted = answer.exhausted
            for leased in answer.groups:
                prompt = codec.prompt_from_message(leased.prompt)
                partial = [codec.sample_from_message(s) for s in leased.partial]
                self._start(group, Work(prompt, partial, leased.lease_seconds))
            if not answer.groups:  # nothing is left, or weights have come that this worker has not heard of yet
                await asyncio.sleep(1.0 if answer.exhausted else 0.02)

    def _start(self, group: asyncio.TaskGroup, work: Work) -> None:
        older = self.work.get(work.prompt.lease_id)
        if older and older.task:  # leased again to us: the buffer takes only the newest lease's samples
            older.task.cancel()
        self.work[work.prompt.lease_id] = work
        work.task = group.create_task(self._work(work), name=f"group {work.prompt.group_id}")

    def _room_for(self) -> int:
        """Groups that fit into the engine's free request slots."""
        open_samples = len(self.work) * self.spec.rollout.samples_per_prompt
        return math.ceil((self.spec.rollout.concurrency - open_samples) / self.spec.rollout.samples_per_prompt)

    async def _until_room(self) -> None:
        while self._room_for() < 1:
            self._room.clear()
            await self._room.wait()

    async def _until_admitted(self) -> None:
        while not (self.membership.latest and self.membership.latest.admitted):
            self.membership.changed.clear()
            await self.membership.changed.wait()

    # --- one group

    async def _work(self, work: Work) -> None:
        lease_id = work.prompt.lease_id
        try:
            group = await self._generate_group(work)
            if self.generator.draining.is_set() and not all(s.status.finished for s in group.samples):
                await self.returns.send(group)
            else:
                await self._submit(group)
        finally:
            if self.work.get(lease_id) is work:
                del self.work[lease_id]
            self._room.set()

    async def _generate_group(self, work: Work) -> SampleGroup:
        prompt = work.prompt
        dataset = self._dataset(prompt)
        count = self.spec.rollout.samples_per_prompt
        if dataset is not None and self.spec.evaluation is not None:
            count = dataset.samples_per_prompt or self.spec.evaluation.samples_per_prompt
        samples = self._continued(work.partial, prompt, count)
        group = SampleGroup(prompt, samples)
        try:
            ids = self.encoder.encode(prompt)
        except PromptTooLongError as error:
            for sample in samples:
                sample.fail(str(error))
            return group
        params = self._sampling(dataset)
        await asyncio.gather(*(self._sample(ids, sample, params, prompt) for sample in samples))
        if self.spec.reward.group:
            await self._score(samples, prompt)
        return group

    async def _sample(self, ids: list[int], sample: Sample, params: dict[str, Any], prompt: Prompt) -> None:
        if sample.status.finished and sample.reward is not None:
            return
        before = sample.response_length
        await self.generator(ids, sample, params)
        self.generated_tokens += sample.response_length - before
        self.last_progress = time.monotonic()
        if sample.status.finished:
            self.finished_samples += 1
            if not self.spec.reward.group:
                await self._score([sample], prompt)

    def _continued(self, partial: list[Sample], prompt: Prompt, count: int) -> list[Sample]:
        """The group's samples: those returned by an earlier lease go on where they stopped, if the weights allow it."""
        given = {sample.index: sample for sample in partial}
        return [
            given[i] if i in given and self._may_continue(given[i], prompt) else Sample(index=i) for i in range(count)
        ]

    def _may_continue(self, sample: Sample, prompt: Prompt) -> bool:
        """Tokens of other weights may stay only where partial rollouts are wanted, never in an evaluation."""
        version = self.membership.latest.version if self.membership.latest else -1
        on_policy = all(span.version == version for span in sample.weight_versions)
        return on_policy or (self.spec.rollout.partial.enabled and prompt.purpose is Purpose.TRAIN)

    def _dataset(self, prompt: Prompt) -> EvaluationDataset | None:
        if prompt.purpose is Purpose.TRAIN or self.spec.evaluation is None:
            return None
        return next(d for d in self.spec.evaluation.datasets if (d.name or source_name(d.path)) == prompt.dataset)

    def _sampling(self, dataset: EvaluationDataset | None) -> dict[str, Any]:
        base = self.spec.rollout.sampling
        if dataset is None or self.spec.evaluation is None:
            return sampling_params(base)
        merged = self.spec.evaluation.sampling.model_dump(exclude_none=True)
        merged |= dataset.sampling.model_dump(exclude_none=True) if dataset.sampling else {}
        return sampling_params(base, type(self.spec.evaluation.sampling).model_validate(merged))

    async def _score(self, samples: list[Sample], prompt: Prompt) -> None:
        """Set rewards. A reward that cannot be had fails its sample with the reason."""
        judged = [s for s in samples if s.status.finished and s.status is not SampleStatus.FAILED]
        inputs = [
            RewardInput(
                prompt=prompt.prompt,
                response=s.response,
                label=prompt.label,
                metadata=prompt.metadata | s.metadata,
                tokens=s.tokens.tolist(),
                response_length=s.response_length,
                truncated=s.status is SampleStatus.TRUNCATED,
            )
            for s in judged
        ]
        for sample, outcome in zip(judged, await self.judge(inputs), strict=True):
            if isinstance(outcome, RewardError):
                logs.get().warning("reward failed", group=prompt.group_id, index=sample.index, error=str(outcome))
                sample.fail(str(outcome))
            else:
                sample.reward, sample.reward_parts = outcome

    async def _submit(self, group: SampleGroup) -> None:
        if self.spec.rollout.partial.mask_off_policy:
            for sample in group.samples:
                mask_off_policy(sample)
        reason = self.keep(group) if group.prompt.purpose is Purpose.TRAIN else None
        if reason is not None:
            group.samples[0].metadata["filtered"] = reason
        answer = await self.submits.send(group)
        if isinstance(answer, pb.SubmitResponse) and answer.outcome == pb.SubmitResponse.OUTCOME_REFUSED:
            logs.get().error("the buffer refused a group", group=group.group_id, reason=answer.message)

    # --- around it

    async def _drain(self) -> None:
        """End running requests and return what they have so far. The buffer keeps every token."""
        self.generator.draining.set()
        try:
            await self.engine.abort()
        except Exception as error:  # the engine may be gone first: what it had is lost, the leases go back all the same
            logs.get().warning("cannot abort at the engine", error=str(error))
        running = [w.task for w in self.work.values() if w.task]
        if running:
            await asyncio.wait(running, timeout=20.0)
        logs.get().info("drained", left=len(self.work))

    async def _heartbeats(self) -> None:
        while True:
            seconds = min((w.lease_seconds for w in self.work.values()), default=30.0) / 3
            await asyncio.sleep(min(seconds, 10.0))
            leases = [
                pb.Lease(lease_id=w.prompt.lease_id, lease_attempt=w.prompt.lease_attempt) for w in self.work.values()
            ]
            for lease in await self.buffer.heartbeat(leases) if leases else []:
                work = self.work.get(lease.lease_id)
                if work and work.task and work.prompt.lease_attempt <= lease.lease_attempt:
                    work.task.cancel()

    async def _watch_engine(self) -> None:
        """A dead or hung engine ends this pod; its leases go back and another continues."""
        failures = 0
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            stalled = bool(self.work) and time.monotonic() - self.last_progress > STALL_SECONDS
            healthy, reason = await self.engine.health(timeout=30.0 if stalled else HEALTH_SECONDS, generate=stalled)
            if stalled and healthy:
                self.last_progress = time.monotonic()
            failures = 0 if healthy else failures + 1
            if failures >= UNHEALTHY_AFTER:
                raise EngineLostError(f"engine {self.engine.url} failed {failures} health checks: {reason}")

    async def _watch_membership(self) -> None:
        """An engine that was dropped from the epoch comes back if it lives; the trainer then sends all weights anew."""
        while True:
            await self.membership.changed.wait()
            if self.membership.refused:
                raise EngineLostError(self.membership.refused)
            latest = self.membership.latest
            if latest and latest.dropped:
                healthy, reason = await self.engine.health(timeout=30.0, generate=True)
                if not healthy:
                    raise EngineLostError(f"dropped from the epoch ({latest.dropped}), and {reason}")
            self.membership.changed.clear()
            await asyncio.sleep(0.5)


def mask_off_policy(sample: Sample) -> None:
    """Train only on tokens of the newest weights that a sample has seen (slime: mask_offpolicy_in_partial_rollout)."""
    newest = max((span.version for span in sample.weight_versions), default=0)
    mask = sample.loss_mask.copy()
    for span in sample.weight_versions:
        if span.version < newest:
            mask[span.start : span.end] = 0
    sample.loss_mask = mask


def engine_lost(error: BaseExceptionGroup[Any]) -> str | None:
    """Why the engine is lost, where that is what ended the worker."""
    for cause in error.exceptions:
        if isinstance(cause, EngineLostError | EngineError):
            return str(cause)
        if isinstance(cause, BaseExceptionGroup) and (found := engine_lost(cause)):
            return found
    return None
