"""The rollout worker: leases prompt groups, generates and scores their samples, submits them.

- A worker pulls its work, so the load balances itself: a slow engine leases less.
- It leases only while the rendezvous says that its engine holds weights that may be used.
- An error in one group ends that group alone. The group returns to the buffer with the reason,
  which counts as one of its failures.
- A worker that must end returns all of its groups. Only groups whose requests may have killed the
  engine count that as a failure.

One group goes from `_lease_forever` through `_run_group` to `GroupMaker.make`, which generates and
scores it, and to `Submitter.submit`.
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
from sluice.telemetry import failure_log, logs, tracing
from sluice.wire import rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout import metrics
from sluice_rollout.buffer import BufferClient
from sluice_rollout.environments.pods import EpisodePods
from sluice_rollout.generate import REQUESTS
from sluice_rollout.group import GroupMaker
from sluice_rollout.health import EngineHealth, EngineLostError
from sluice_rollout.leased_group import LeasedGroup
from sluice_rollout.load import GROUP_LOAD, Load
from sluice_rollout.stored_weights import StoredWeights
from sluice_rollout.submit import Submitter
from sluice_rollout.user_functions.filters import FilterError

LEASE_WAIT_SECONDS = 60.0
NEWS_SECONDS = 0.25
HEARTBEAT_SECONDS = 20.0
# The rendezvous counts the seconds of each state by the states that it is told.
STATE_CHECKS_PER_HEARTBEAT = 8
ABORT_SECONDS = 0.5
# A worker holds at most this many times the samples that it generates at a time.
HELD_SAMPLES_FACTOR = 4
# Limit of the last returns, of groups whose tasks did not end in time.
RETURN_SECONDS = 5.0


class WorkerError(Exception):
    """The pod must be replaced, because it has lost its engine, its buffer or its membership."""


@dataclass(slots=True)
class Worker:
    """The worker of one engine, from its first lease until it ends."""

    spec: RLJobSpec
    engine: Client
    group_maker: GroupMaker
    submitter: Submitter
    buffer: BufferClient
    membership: Membership
    drain_seconds: float = 20.0
    load: Load = field(default_factory=Load)
    # Brings weights to the engine; None if the trainer does.
    stored_weights: StoredWeights | None = None
    # Pods of the job's episodes, if there are any.
    episode_pods: EpisodePods | None = None
    # Groups in work, by lease id.
    leased_groups: dict[str, LeasedGroup] = field(default_factory=dict)
    # Why this worker must end; None if it was not lost.
    lost: Exception | None = None
    _ending: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def health(self) -> EngineHealth:
        return self.group_maker.generator.health

    @property
    def state(self) -> str:
        """`unresponsive` while the engine fails its health checks, else the state of the load.

        The load is `idle`, `generating` or `tail`.
        """
        if self.health.unhealthy:
            return "unresponsive"
        return self.load.state(has_groups=bool(self.leased_groups))

    def unready(self) -> str:
        """Return why this worker is not ready; empty if it is.

        It stays ready while the engine's weights are replaced.
        """
        latest = self.membership.latest
        if self.health.unhealthy:
            return f"the engine is not healthy: {self.health.unhealthy}"
        if latest is None or not self.membership.connected.is_set():
            return "not joined: the rendezvous does not answer"
        if not latest.admitted:
            reason = self.stored_weights.problem if self.stored_weights else latest.dropped
            return f"the engine holds no weights that may be used{f' ({reason})' if reason else ''}"
        return ""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set or the worker must end, then give all groups back.

        Raises
        ------
        WorkerError
            If this pod must be replaced.
        ConfigurationError
            If no restart can help.

        """
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(coroutine)
                    for coroutine in (
                        self.submitter.submits.run(),
                        self.submitter.returns.run(),
                        self._heartbeats(),
                        self._report_state(),
                        self._watch_engine(),
                        self._watch_membership(),
                        self._end_on(stop),
                    )
                ]
                if self.stored_weights:
                    helpers.append(tasks.create_task(self.stored_weights.run()))
                if self.episode_pods:
                    following = self.episode_pods.follow(self.membership)
                    helpers.append(tasks.create_task(following))
                leasing = tasks.create_task(self._lease_forever(tasks))
                await self._ending.wait()
                leasing.cancel()
                await self._drain()
                for task in helpers:
                    task.cancel()
        except ExceptionGroup as errors:
            reason = _exit_error(self.lost) if self.lost else _exit_reason(errors)
            if reason is None:
                raise
            raise reason from None
        if self.lost:
            raise _exit_error(self.lost) from None

    async def _end_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._ending.set()

    def _lose(self, error: Exception) -> None:
        """End this worker, and blame groups whose requests may have killed or hung the engine."""
        if self.lost:
            return
        self.lost = error
        if isinstance(error, EngineLostError) and error.blames:
            for leased in self.leased_groups.values():
                leased.failure = str(error) if leased.requests.at_engine else ""
        self._ending.set()

    # --- leasing

    async def _lease_forever(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._wait_until_admitted()
            await self._wait_for_room()
            news = self.membership.news_count
            self.load.note_lease(waiting=True)
            messages, exhausted = await self.buffer.lease(
                self._groups_that_fit(),
                self.membership.version,
                LEASE_WAIT_SECONDS,
                self._held_leases,
            )
            for message in messages:
                group_load = self.load.add_group(self.spec.rollout.samples_per_prompt)
                self._start(tasks, LeasedGroup.from_message(message, group_load))
            if messages:
                self.load.note_lease(waiting=False)
            else:
                # No prompt is left, or weights have come that this worker has not heard of yet.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0 if exhausted else NEWS_SECONDS):
                        await self.membership.news(news)

    def _start(self, tasks: asyncio.TaskGroup, leased: LeasedGroup) -> None:
        older = self.leased_groups.get(leased.prompt.lease_id)
        if older and older.task:
            # The buffer leased the group again, and takes samples of the newest lease only.
            older.task.cancel()
        self.leased_groups[leased.prompt.lease_id] = leased
        name = f"group {leased.prompt.group_id}"
        leased.task = tasks.create_task(self._run_group(leased), name=name)

    def _held_leases(self) -> list[pb.Lease]:
        return [
            pb.Lease(lease_id=g.prompt.lease_id, lease_attempt=g.prompt.lease_attempt)
            for g in self.leased_groups.values()
        ]

    def _groups_that_fit(self) -> int:
        """Return the number of groups for which the engine has free places.

        A sample holds its place until its last token, so the long responses of a group do not hold
        the places of its short ones. The total is bounded as well, so that rewards that are slower
        than the engine hold it back.
        """
        rollout = self.spec.rollout
        places, size = rollout.samples_at_once, rollout.samples_per_prompt
        held = len(self.leased_groups) * size
        free = min(places - self.load.samples, HELD_SAMPLES_FACTOR * places - held)
        return math.ceil(free / size)

    async def _wait_for_room(self) -> None:
        while self._groups_that_fit() < 1:
            self.load.decreased.clear()
            await self.load.decreased.wait()

    async def _wait_until_admitted(self) -> None:
        while not (self.membership.latest and self.membership.latest.admitted):
            await self.membership.news(self.membership.news_count)

    # --- one group

    async def _run_group(self, leased: LeasedGroup) -> None:
        """Make and submit one group; on any error, give it back."""
        lease_id = leased.prompt.lease_id
        REQUESTS.set(leased.requests)
        GROUP_LOAD.set(leased.load)
        metrics.LEASES.inc()
        try:
            with tracing.span("work", group=leased.name):
                await self._make_and_submit(leased)
        except EngineLostError as error:
            self._lose(error)
            failure = str(error) if error.blames else ""
            await self.submitter.give_back(leased.without_samples(failure), leased)
        except Exception as error:
            # User code may raise anything. The error belongs to this group alone.
            metrics.GROUP_FAILURES.labels(reason=_failure_kind(error)).inc()
            line = _failure_line(error)
            failure_log.LOG.note(
                "a group failed",
                line,
                error_summary.formatted_traceback(error),
                group=leased.prompt.group_id,
            )
            await self.submitter.give_back(leased.without_samples(line), leased)
        finally:
            if self.leased_groups.get(lease_id) is leased:
                del self.leased_groups[lease_id]
            metrics.LEASES.dec()
            if leased.submitted:
                metrics.GROUP_SECONDS.observe(leased.seconds)
            leased.load.expect(0)
            self.load.decreased.set()

    async def _make_and_submit(self, leased: LeasedGroup) -> None:
        """Submit the group, or give back what a drain has left of it."""
        group = await self.group_maker.make(*leased.decode())
        if all(sample.status.finished for sample in group.samples):
            await self.submitter.submit(group, leased, tail_seconds=self.load.tail_seconds)
        else:
            group.failure = leased.failure
            await self.submitter.give_back(group, leased)

    # --- the end of the worker

    async def _drain(self) -> None:
        """End running requests and give back their tokens so far, which the buffer keeps."""
        self.group_maker.generator.draining.set()
        end = time.monotonic() + self.drain_seconds
        groups = list(self.leased_groups.values())
        running = {g.task for g in groups if g.task}
        while running and time.monotonic() < end:
            # Repeated, because a request may have been on its way to the engine.
            await self._abort_requests(groups)
            _, running = await asyncio.wait(running, timeout=ABORT_SECONDS)
        for task in running:
            task.cancel()
        returns = [
            asyncio.create_task(self.submitter.give_back(g.without_samples(g.failure), g))
            for g in groups
            if not g.settled
        ]
        if returns:
            _, unsent = await asyncio.wait(returns, timeout=RETURN_SECONDS)
            for task in unsent:
                task.cancel()
        logs.get().info("drained", left=len(returns))

    async def _abort_requests(self, groups: list[LeasedGroup]) -> None:
        """End the requests at the engine; at a lost engine, which does not answer, cancel tasks."""
        if isinstance(self.lost, EngineLostError):
            for leased in groups:
                if leased.task and leased.requests.at_engine:
                    leased.task.cancel()
            return
        try:
            await self.engine.abort()
        except EngineError as error:
            # The engine ended first, and its tokens are lost. The leases go back all the same.
            logs.get().warning("cannot abort at the engine", error=str(error))

    # --- background tasks

    async def _heartbeats(self) -> None:
        """Extend the leases, and drop those that the buffer does not want any more."""
        interval = min(self.spec.buffer.lease_seconds / 3, HEARTBEAT_SECONDS)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._wait_for_new_weights()
            leases = self._held_leases()
            for lease in await self.buffer.heartbeat(leases) if leases else []:
                leased = self.leased_groups.get(lease.lease_id)
                if leased and leased.task and leased.prompt.lease_attempt <= lease.lease_attempt:
                    leased.task.cancel()

    async def _wait_for_new_weights(self) -> None:
        """Wait until weights have come, and a moment more until their step is committed.

        The heartbeat that follows drops the samples that over-sampling started in vain, so they
        are not in the way of the new step's prompts.
        """
        before = self.membership.version
        while self.membership.version == before:
            await self.membership.news(self.membership.news_count)
        await asyncio.sleep(NEWS_SECONDS)

    async def _report_state(self) -> None:
        """Send a heartbeat soon after the state has changed, so that its seconds are counted.

        The state is checked eight times between two heartbeats, which bounds the messages,
        whatever the requests do. A rendezvous that wants fewer heartbeats gets fewer of these.
        """
        reported = self.state
        while True:
            await asyncio.sleep(self.membership.interval / STATE_CHECKS_PER_HEARTBEAT)
            if self.state != reported:
                reported = self.state
                self.membership.beat()

    async def _watch_engine(self) -> None:
        """End this worker if the engine is dead or hung, so that its leases go back."""
        try:
            await self.health.watch(lambda: bool(self.leased_groups))
        except EngineLostError as error:
            self._lose(error)

    async def _watch_membership(self) -> None:
        """End this worker if its engine was dropped from the epoch and is not healthy.

        A healthy engine joins again, and the trainer then sends all weights anew.
        """
        seen = 0
        while True:
            seen = await self.membership.news(seen)
            if self.membership.refused:
                return self._lose(self.membership.refused)
            latest = self.membership.latest
            if latest and latest.dropped:
                reason = await self.health.judge(dropped=True)
                latest_now = self.membership.latest
                if reason and latest_now and latest_now.dropped:
                    return self._lose(
                        EngineLostError(f"dropped from the epoch ({latest.dropped}), and {reason}")
                    )
            await asyncio.sleep(0.5)


def _failure_line(error: Exception) -> str:
    """Describe a failure in one line, which is the same for the same cause."""
    if isinstance(error, FilterError):
        return str(error)
    return (
        error_summary.type_and_message(error)
        if isinstance(error, EngineError)
        else error_summary.cause(error)
    )


def _failure_kind(error: Exception) -> str:
    """Return the label of a group's failure in metrics."""
    kinds = {RequestTimeoutError: "timeout", EngineError: "engine", FilterError: "filter"}
    return next((word for kind, word in kinds.items() if isinstance(error, kind)), "internal")


def _exit_error(error: Exception) -> WorkerError | ConfigurationError:
    """Return the error that ends the worker. A restart does not mend a wrong configuration."""
    return error if isinstance(error, WorkerError | ConfigurationError) else WorkerError(str(error))


def _exit_reason(errors: ExceptionGroup[Any]) -> WorkerError | ConfigurationError | None:
    """Return the error that ends the worker, or None if a traceback should be shown."""
    expected = WorkerError | ConfigurationError | EngineError | rpc.RefusedError | rpc.DeadlineError
    for error in errors.exceptions:
        if isinstance(error, expected):
            return _exit_error(error)
    return None
