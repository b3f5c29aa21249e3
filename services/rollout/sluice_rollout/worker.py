"""The rollout worker: lease a prompt group, generate its samples at the engine beside,
score them, submit.

The worker pulls, so that the load balances itself: an engine that is slow leases less. It leases
only while the rendezvous says that its engine holds weights that may be used.

An error in the work of one group ends that group's work alone: it goes back with the reason, which
counts against it. A worker that must end gives all its groups back; only those whose requests may
have killed the engine are blamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import Any

from sluice.api import RLJobSpec
from sluice.engines.protocol import Client, EngineError, RequestTimeoutError
from sluice.runtime import error_summary
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import (
    ENGINE_LATENCY,
    WORKER,
    WORKER_BUSY,
    WORKER_TAIL,
    Purpose,
    SampleGroup,
    SampleStatus,
)
from sluice.telemetry import logs, tracing
from sluice.wire import codec, rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout import failures, metrics
from sluice_rollout.buffer import BufferClient, Outbox
from sluice_rollout.generate import REQUESTS
from sluice_rollout.group import GroupMaker, mask_off_policy
from sluice_rollout.health import EngineHealth, EngineLostError
from sluice_rollout.leased_group import Work
from sluice_rollout.load import SHARE, Load
from sluice_rollout.user_functions.filters import Filter, FilterError

LEASE_WAIT_SECONDS = 60.0
NEWS_SECONDS = 0.25
HEARTBEAT_SECONDS = 20.0
LOOKS_PER_HEARTBEAT = 8
"""At the state of which the rendezvous counts the seconds."""
ABORT_SECONDS = 0.5
WORK_FACTOR = 4
"""A worker's groups have at most so many times the samples that it generates side by side."""
RETURN_SECONDS = 5.0
"""For what is given back last, of work that did not end in time."""


class WorkerError(Exception):
    """This pod cannot go on and must be replaced: its engine, its buffer or its place is lost. The
    message says why.
    """


@dataclass(slots=True)
class Worker:
    spec: RLJobSpec
    engine: Client
    make: GroupMaker
    keep: Filter
    buffer: BufferClient
    membership: Membership
    submits: Outbox
    returns: Outbox
    drain_seconds: float = 20.0
    work: dict[str, Work] = field(default_factory=dict)
    exhausted: bool = False
    lost: Exception | None = None
    """Why this worker must end, where nobody has told it to."""
    load: Load = field(default_factory=Load)
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def health(self) -> EngineHealth:
        return self.make.generator.health

    @property
    def state(self) -> str:
        """`unresponsive` while the engine fails its health checks; else `idle`, `generating` or
        `tail` (`Load`).
        """
        return "unresponsive" if self.health.unhealthy else self.load.state(work=bool(self.work))

    def unready(self) -> str:
        """Why this engine does no work, in words;
        empty: it does, also while its weights are being replaced.
        """
        latest = self.membership.latest
        if self.health.unhealthy:
            return f"the engine is not healthy: {self.health.unhealthy}"
        if latest is None or not self.membership.connected.is_set():
            return "not joined: the rendezvous does not answer"
        if not latest.admitted:
            return (
                "the engine holds no weights that may be "
                f"used{f' ({latest.dropped})' if latest.dropped else ''}"
            )
        return ""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, or until it must end; give everything back. Raises WorkerError."""
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(coroutine)
                    for coroutine in (
                        self.submits.run(),
                        self.returns.run(),
                        self._heartbeats(),
                        self._tell_state(),
                        self._watch_engine(),
                        self._watch_membership(),
                        self._stop_at(stop),
                    )
                ]
                leasing = group.create_task(self._lease_forever(group))
                await self._over.wait()
                leasing.cancel()
                await self._drain()
                for task in helpers:
                    task.cancel()
        except ExceptionGroup as errors:
            reason = _ending(self.lost) if self.lost else _reason(errors)
            if reason is None:
                raise
            raise reason from None
        if self.lost:
            raise _ending(self.lost) from None

    async def _stop_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._over.set()

    def _lose(self, error: Exception) -> None:
        """This worker ends. Requests that are at an engine that dies or hangs may be
        why it does.
        """
        if self.lost:
            return
        self.lost = error
        if isinstance(error, EngineLostError) and error.blames:
            for work in self.work.values():
                work.failure = str(error) if work.requests.at_engine else ""
        self._over.set()

    # --- leasing

    async def _lease_forever(self, group: asyncio.TaskGroup) -> None:
        while True:
            await self._until_admitted()
            await self._until_room()
            news = self.membership.news_count
            self.load.leasing(waits=True)
            groups, self.exhausted = await self.buffer.lease(
                self._room_for(), self.membership.version, LEASE_WAIT_SECONDS, self._leases
            )
            for leased in groups:
                share = self.load.group(self.spec.rollout.samples_per_prompt)
                self._start(group, Work.of(leased, share))
            if groups:
                self.load.leasing(waits=False)
            else:  # nothing is left, or weights have come that this worker has not heard of yet
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0 if self.exhausted else NEWS_SECONDS):
                        await self.membership.news(news)

    def _start(self, group: asyncio.TaskGroup, work: Work) -> None:
        older = self.work.get(work.prompt.lease_id)
        if (
            older and older.task
        ):  # leased again to us: the buffer takes only the newest lease's samples
            older.task.cancel()
        self.work[work.prompt.lease_id] = work
        work.task = group.create_task(self._work(work), name=f"group {work.prompt.group_id}")

    def _leases(self) -> list[pb.Lease]:
        """All that this worker has in work."""
        return [
            pb.Lease(lease_id=w.prompt.lease_id, lease_attempt=w.prompt.lease_attempt)
            for w in self.work.values()
        ]

    def _room_for(self) -> int:
        """Groups that fit into the engine's free places. A sample has its place until its last
        token: the long responses of a group do not keep those of the short ones. What waits for its
        reward or for the rest of its group is bounded too, so that rewards slower than the engine
        hold it back.
        """
        rollout = self.spec.rollout
        places, size = rollout.samples_at_once, rollout.samples_per_prompt
        unfinished = len(self.work) * size
        free = min(places - self.load.samples, WORK_FACTOR * places - unfinished)
        return math.ceil(free / size)

    async def _until_room(self) -> None:
        while self._room_for() < 1:
            self.load.less.clear()
            await self.load.less.wait()

    async def _until_admitted(self) -> None:
        while not (self.membership.latest and self.membership.latest.admitted):
            await self.membership.news(self.membership.news_count)

    # --- one group

    async def _work(self, work: Work) -> None:
        lease_id = work.prompt.lease_id
        REQUESTS.set(work.requests)
        SHARE.set(work.share)
        metrics.LEASES.inc()
        try:
            with tracing.span("work", group=work.name):
                await self._make(work)
        except EngineLostError as error:
            self._lose(error)
            await self._give_back(work.bare(str(error) if error.blames else ""), work)
        except Exception as error:  # whatever it is, it is this group's
            metrics.GROUP_FAILURES.labels(reason=_kind(error)).inc()
            failures.LOG.note(
                "a group failed",
                _line(error),
                error_summary.full(error),
                group=work.prompt.group_id,
            )
            await self._give_back(work.bare(_line(error)), work)
        finally:
            if self.work.get(lease_id) is work:
                del self.work[lease_id]
            metrics.LEASES.dec()
            if work.submitted:
                metrics.GROUP_SECONDS.observe(work.seconds)
            work.share.expect(0)
            self.load.less.set()

    async def _make(self, work: Work) -> None:
        """Finish the group, or as much of it as a drain leaves time for."""
        group = await self.make(*work.read())
        if all(sample.status.finished for sample in group.samples):
            await self._submit(group, work)
            work.settled = work.submitted = True
            metrics.GROUPS.labels("submitted").inc()
        else:
            group.failure = work.failure
            await self._give_back(group, work)

    async def _give_back(self, group: SampleGroup, work: Work) -> None:
        await self.returns.send(group)
        work.settled = True
        metrics.GROUPS.labels("returned").inc()

    async def _submit(self, group: SampleGroup, work: Work) -> None:
        if self.spec.rollout.partial.mask_off_policy:
            for sample in group.samples:
                mask_off_policy(sample)
        failed = all(sample.status is SampleStatus.FAILED for sample in group.samples)
        judged = (
            group.prompt.purpose is Purpose.TRAIN and not failed
        )  # a failure is no filter's business
        reason = await self.keep(group) if judged else None
        if reason is not None:
            group.samples[0].metadata["filtered"] = reason
        group.samples[0].metadata |= {
            WORKER: self.buffer.worker,
            WORKER_BUSY: round(work.busy, 3),
            WORKER_TAIL: round(self.load.tail_seconds, 3),
        }
        if (latency := work.requests.latency) is not None:
            group.samples[0].metadata[ENGINE_LATENCY] = round(latency, 6)
        # As it was leased, whatever the user's code did to it.
        group.prompt = codec.prompt_from_message(work.leased.prompt)
        with tracing.span("submit"):
            answer = await self.submits.send(group)
        if (
            isinstance(answer, pb.SubmitResponse)
            and answer.outcome == pb.SubmitResponse.OUTCOME_REFUSED
        ):
            logs.get().error(
                "the buffer refused a group", group=group.group_id, reason=answer.message
            )

    # --- around it

    async def _drain(self) -> None:
        """End running requests and return what they have so far. The buffer keeps every token."""
        self.make.generator.draining.set()
        end = time.monotonic() + self.drain_seconds
        works = list(self.work.values())
        running = {w.task for w in works if w.task}
        while running and time.monotonic() < end:
            await self._end_requests(works)
            _, running = await asyncio.wait(running, timeout=ABORT_SECONDS)
        for task in running:
            task.cancel()
        left = [
            asyncio.create_task(self._give_back(w.bare(w.failure), w))
            for w in works
            if not w.settled
        ]
        if left:
            _, unsent = await asyncio.wait(left, timeout=RETURN_SECONDS)
            for sending in unsent:
                sending.cancel()
        logs.get().info("drained", left=len(left))

    async def _end_requests(self, works: list[Work]) -> None:
        """Again and again: one may have been on its way. A lost engine answers none any more."""
        if isinstance(self.lost, EngineLostError):
            for work in works:
                if work.task and work.requests.at_engine:
                    work.task.cancel()
            return
        try:
            await self.engine.abort()
        except (
            EngineError
        ) as error:  # it was the first to go: what it had is lost, the leases go back all the same
            logs.get().warning("cannot abort at the engine", error=str(error))

    async def _heartbeats(self) -> None:
        interval = min(self.spec.buffer.lease_seconds / 3, HEARTBEAT_SECONDS)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._new_weights()
            leases = self._leases()
            for lease in await self.buffer.heartbeat(leases) if leases else []:
                work = self.work.get(lease.lease_id)
                if work and work.task and work.prompt.lease_attempt <= lease.lease_attempt:
                    work.task.cancel()

    async def _tell_state(self) -> None:
        """Send a heartbeat soon after the state has changed, so that its seconds are counted.

        It is looked at eight times between two heartbeats: no more messages than that, whatever
        the requests do, and fewer where the rendezvous wants fewer heartbeats.
        """
        told = self.state
        while True:
            await asyncio.sleep(self.membership.interval / LOOKS_PER_HEARTBEAT)
            if self.state != told:
                told = self.state
                self.membership.beat()

    async def _new_weights(self) -> None:
        """Until weights have come, and a moment more: their step is then committed.

        What over-sampling has started in vain is dropped by the heartbeat that follows, and no
        longer in the way of the new step's prompts.
        """
        before = self.membership.version
        while self.membership.version == before:
            await self.membership.news(self.membership.news_count)
        await asyncio.sleep(NEWS_SECONDS)

    async def _watch_engine(self) -> None:
        """A dead or hung engine ends this pod; its leases go back and another continues."""
        try:
            await self.health.watch(lambda: bool(self.work))
        except EngineLostError as error:
            self._lose(error)

    async def _watch_membership(self) -> None:
        """An engine that was dropped from the epoch comes back if it lives; the trainer then sends
        all weights anew.
        """
        seen = 0
        while True:
            seen = await self.membership.news(seen)
            if self.membership.refused:
                return self._lose(self.membership.refused)
            latest = self.membership.latest
            if latest and latest.dropped:
                reason = await self.health.judge(dropped=True)
                still = self.membership.latest
                if reason and still and still.dropped:
                    return self._lose(
                        EngineLostError(f"dropped from the epoch ({latest.dropped}), and {reason}")
                    )
            await asyncio.sleep(0.5)


def _line(error: Exception) -> str:
    """The failure on one line, which is the same for the same cause."""
    if isinstance(error, FilterError):
        return str(error)
    return (
        error_summary.named(error) if isinstance(error, EngineError) else error_summary.cause(error)
    )


def _kind(error: Exception) -> str:
    """Of a group's failure, for metrics."""
    kinds = {RequestTimeoutError: "timeout", EngineError: "engine", FilterError: "filter"}
    return next((word for kind, word in kinds.items() if isinstance(error, kind)), "internal")


def _ending(error: Exception) -> WorkerError | ConfigurationError:
    """The error with which the worker ends: no restart cures a wrong configuration."""
    return error if isinstance(error, WorkerError | ConfigurationError) else WorkerError(str(error))


def _reason(errors: ExceptionGroup[Any]) -> WorkerError | ConfigurationError | None:
    """The end of the worker in words, where a person need only be told."""
    for error in errors.exceptions:
        told = WorkerError | ConfigurationError | EngineError | rpc.RefusedError | rpc.DeadlineError
        if isinstance(error, told):
            return _ending(error)
    return None
