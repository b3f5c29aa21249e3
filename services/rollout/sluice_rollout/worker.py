"""The rollout worker: lease a prompt group, generate its samples at the engine beside, score them, submit.

The worker pulls, so that the load balances itself: an engine that is slow leases less. It leases only while the
rendezvous says that its engine holds weights that may be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import Any

from sluice.api import RLJobSpec
from sluice.sample import Prompt, Purpose, Sample, SampleGroup
from sluice.telemetry import logs
from sluice.wire import codec, rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout.buffer import BufferClient, Outbox
from sluice_rollout.engine import Engine, EngineError
from sluice_rollout.filters import Filter
from sluice_rollout.group import GroupMaker, mask_off_policy

LEASE_WAIT_SECONDS = 10.0
HEALTH_SECONDS = 5.0
UNHEALTHY_AFTER = 3
STALL_SECONDS = 60.0
NEWS_SECONDS = 0.25
HEARTBEAT_SECONDS = 10.0
ABORT_SECONDS = 0.5


class WorkerError(Exception):
    """This pod cannot go on and must be replaced: its engine, its buffer or its place is lost. The message says why."""


@dataclass(slots=True)
class Work:
    """One leased group."""

    prompt: Prompt
    partial: list[Sample]
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Worker:
    spec: RLJobSpec
    engine: Engine
    make: GroupMaker
    keep: Filter
    buffer: BufferClient
    membership: Membership
    submits: Outbox
    returns: Outbox
    drain_seconds: float = 20.0
    work: dict[str, Work] = field(default_factory=dict)
    exhausted: bool = False
    unhealthy: str = ""
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    def unready(self) -> str:
        """Why this engine does no work, in words; empty: it does, also while its weights are being replaced."""
        latest = self.membership.latest
        if self.unhealthy:
            return f"the engine is not healthy: {self.unhealthy}"
        if latest is None or not self.membership.connected.is_set():
            return "not joined: the rendezvous does not answer"
        if not latest.admitted:
            return f"the engine holds no weights that may be used{f' ({latest.dropped})' if latest.dropped else ''}"
        return ""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, then give everything back. Raises WorkerError."""
        try:
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
        except ExceptionGroup as errors:
            if (reason := _reason(errors)) is None:
                raise
            raise WorkerError(reason) from None

    # --- leasing

    async def _lease_forever(self, group: asyncio.TaskGroup) -> None:
        while True:
            await self._until_admitted()
            await self._until_room()
            news = self.membership.news_count
            answer = await self.buffer.lease(self._room_for(), self.membership.version, LEASE_WAIT_SECONDS)
            self.exhausted = answer.exhausted
            for leased in answer.groups:
                prompt = codec.prompt_from_message(leased.prompt)
                partial = [codec.sample_from_message(s) for s in leased.partial]
                self._start(group, Work(prompt, partial))
            if not answer.groups:  # nothing is left, or weights have come that this worker has not heard of yet
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.membership.news(news), 1.0 if answer.exhausted else NEWS_SECONDS)

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
            await self.membership.news(self.membership.news_count)

    # --- one group

    async def _work(self, work: Work) -> None:
        lease_id = work.prompt.lease_id
        try:
            group = await self.make(work.prompt, work.partial)
            if all(sample.status.finished for sample in group.samples):
                await self._submit(group)
            else:
                await self.returns.send(group)
        finally:
            if self.work.get(lease_id) is work:
                del self.work[lease_id]
            self._room.set()

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
        self.make.generator.draining.set()
        end = time.monotonic() + self.drain_seconds
        running = {w.task for w in self.work.values() if w.task}
        while running and time.monotonic() < end:
            try:
                await self.engine.abort()  # again and again: a request may have been on its way to the engine
            except EngineError as error:  # it was the first to go: what it had is lost, the leases go back all the same
                logs.get().warning("cannot abort at the engine", error=str(error))
            _, running = await asyncio.wait(running, timeout=ABORT_SECONDS)
        for task in running:
            task.cancel()
        logs.get().info("drained", left=len(running))

    async def _heartbeats(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._new_weights(), min(self.spec.buffer.lease_seconds / 3, HEARTBEAT_SECONDS))
            leases = [
                pb.Lease(lease_id=w.prompt.lease_id, lease_attempt=w.prompt.lease_attempt) for w in self.work.values()
            ]
            for lease in await self.buffer.heartbeat(leases) if leases else []:
                work = self.work.get(lease.lease_id)
                if work and work.task and work.prompt.lease_attempt <= lease.lease_attempt:
                    work.task.cancel()

    async def _new_weights(self) -> None:
        """Until weights have come, and a moment more: their step is then committed.

        What over-sampling has started in vain is dropped by the heartbeat that follows, and no longer in the way of the
        new step's prompts.
        """
        before = self.membership.version
        while self.membership.version == before:
            await self.membership.news(self.membership.news_count)
        await asyncio.sleep(NEWS_SECONDS)

    async def _watch_engine(self) -> None:
        """A dead or hung engine ends this pod; its leases go back and another continues."""
        failures = 0
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            stalled = bool(self.work) and time.monotonic() - self.make.last_progress > STALL_SECONDS
            if stalled and await self.engine.rests():
                stalled, self.make.last_progress = False, time.monotonic()
            healthy, reason = await self.engine.health(timeout=30.0 if stalled else HEALTH_SECONDS, generate=stalled)
            if stalled and healthy:
                self.make.last_progress = time.monotonic()
            failures = 0 if healthy else failures + 1
            self.unhealthy = "" if healthy else reason
            if failures >= UNHEALTHY_AFTER:
                raise WorkerError(f"engine {self.engine.url} failed {failures} health checks: {reason}")

    async def _watch_membership(self) -> None:
        """An engine that was dropped from the epoch comes back if it lives; the trainer then sends all weights anew."""
        seen = 0
        while True:
            seen = await self.membership.news(seen)
            if self.membership.refused:
                raise WorkerError(self.membership.refused)
            latest = self.membership.latest
            if latest and latest.dropped:
                healthy, reason = await self.engine.health(timeout=30.0, generate=True)
                still = self.membership.latest  # an engine that is paused for an update is not healthy, and no failure
                if not healthy and still and still.dropped:
                    raise WorkerError(f"dropped from the epoch ({latest.dropped}), and {reason}")
            await asyncio.sleep(0.5)


def _reason(errors: ExceptionGroup[Any]) -> str | None:
    """What ended the worker, where it is something that a person need only be told."""
    for error in errors.exceptions:
        if isinstance(error, WorkerError | EngineError | rpc.RefusedError | rpc.DeadlineError):
            return str(error)
    return None
