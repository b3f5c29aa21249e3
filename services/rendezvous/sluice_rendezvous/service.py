"""The rendezvous over gRPC: streams in, registry, streams out.

A member hears only of changes to itself, so what one engine does causes no message to a thousand
others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc
import grpc.aio

from sluice.telemetry import logs
from sluice.weight_store.manifest import VersionId
from sluice.wire import protocol
from sluice.wire.membership import HEARTBEAT_SECONDS
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_rendezvous import metrics
from sluice_rendezvous.device_time import DeviceTime
from sluice_rendezvous.registry import (
    MemberEntry,
    Registry,
    StaleAttemptError,
)

MEMBER_TIMEOUT_SECONDS = 5 * HEARTBEAT_SECONDS
MAX_WAIT_SECONDS = 60.0


class RendezvousService(rendezvous_pb2_grpc.RendezvousServicer):  # type: ignore[misc]
    """All calls run on one event loop, so the registry needs no lock."""

    def __init__(self, member_timeout: float = MEMBER_TIMEOUT_SECONDS) -> None:
        """Create an empty registry.

        `member_timeout` is the seconds of silence after which a member is dropped
        (`Registry.expire`).
        """
        self.registry = Registry()
        self.device_time = DeviceTime()
        self.updates = metrics.Updates()
        self._member_timeout = member_timeout
        self._streams: dict[tuple[str, int], asyncio.Event] = {}
        self._arrivals: dict[str, asyncio.Event] = {}
        # The operator's last report of pods of episodes, by name of their worker.
        self._episode_pods: Mapping[str, pb.EpisodePodStates] = {}
        self._log = logs.get()

    async def Join(
        self, requests: AsyncIterator[pb.MemberMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ServerMessage]:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("body") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
            return
        try:
            entry = self.registry.join(entry_from(first.hello), time.monotonic(), first.sources)
        except StaleAttemptError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            return
        self._log.info(
            "joined",
            member=entry.name,
            of_attempt=entry.attempt,
            address=entry.address,
            epoch=self.registry.epoch,
        )
        self.device_time.join(entry, time.monotonic())
        metrics.JOINS.labels(entry.role).inc()
        self._wake(entry.key)  # ends its older stream, which this one replaces
        news = self._streams[entry.key] = asyncio.Event()
        self._arrived(entry.role)
        reader = asyncio.create_task(self._read(requests, entry, news))
        try:
            async for message in self._messages(entry, news, reader):
                yield message
        finally:
            reader.cancel()
            if self._streams.get(entry.key) is news:
                del self._streams[entry.key]
            if self.registry.leave(entry):
                self.device_time.leave(entry, time.monotonic())
                metrics.LEAVES.labels(entry.role).inc()
                self._log.info(
                    "left", member=entry.name, of_attempt=entry.attempt, epoch=self.registry.epoch
                )

    async def _read(
        self, requests: AsyncIterator[pb.MemberMessage], entry: MemberEntry, news: asyncio.Event
    ) -> None:
        try:
            async for message in requests:
                beat = message.heartbeat
                entry.last_heartbeat = time.monotonic()
                entry.state, entry.gauges = beat.state, beat.gauges
                entry.episode_pods = beat.episode_pods if beat.HasField("episode_pods") else None
                self.device_time.state(entry, entry.last_heartbeat)
                if entry.role != "rollout":
                    entry.version = beat.version
                elif beat.HasField("loaded"):
                    loaded = VersionId(beat.loaded.version, beat.loaded.attempt)
                    if loaded != entry.loaded:
                        self.registry.load(entry, loaded)
                        news.set()
                if entry.heartbeat_seconds != self.registry.heartbeat_seconds:
                    news.set()
        finally:
            news.set()

    async def _messages(
        self, entry: MemberEntry, news: asyncio.Event, reader: asyncio.Task[None]
    ) -> AsyncIterator[pb.ServerMessage]:
        """Yield messages to this member when its facts change, until it leaves or is replaced."""
        sent: pb.ServerMessage | None = None
        while not reader.done() and self.registry.entries.get(entry.key) is entry:
            news.clear()
            entry.heartbeat_seconds = self.registry.heartbeat_seconds
            message = pb.ServerMessage(
                admitted=entry.admitted,
                version=entry.version,
                dropped=entry.dropped,
                heartbeat_seconds=entry.heartbeat_seconds,
                sources=self.registry.sources,
                protocol=protocol.PROTOCOL,
                published=self._published(entry),
                episode_pods=self._episode_pods_of(entry),
            )
            if message != sent:
                yield message
                sent = message
            await news.wait()

    def _published(self, entry: MemberEntry) -> pb.StoredWeights | None:
        newest = self.registry.published
        if newest is None or entry.role != "rollout":
            return None
        return pb.StoredWeights(version=newest.version, attempt=newest.attempt)

    def _episode_pods_of(self, entry: MemberEntry) -> Sequence[pb.EpisodePodState]:
        reported = self._episode_pods.get(entry.name)
        return reported.pods if reported and entry.role == "rollout" else ()

    async def AddressBook(
        self, request: pb.AddressBookRequest, context: grpc.aio.ServicerContext
    ) -> pb.AddressBookResponse:
        deadline = time.monotonic() + min(request.wait_seconds, MAX_WAIT_SECONDS)
        while True:
            members = self.registry.members(request.role, request.attempt)
            left = deadline - time.monotonic()
            if len(members) >= request.at_least or left <= 0:
                return pb.AddressBookResponse(
                    epoch=self.registry.epoch, members=[member_of(e) for e in members]
                )
            await self._arrival(request.role, left)

    async def BeginUpdate(
        self, request: pb.BeginUpdateRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdatePlan:
        new_source = self.registry.sources.get(request.source) != request.attempt
        self.updates.begin(time.monotonic())
        try:
            if request.published:
                self.registry.publish(request.source, request.attempt, request.version)
                engines = []
            else:
                engines = self.registry.begin_update(
                    request.source,
                    request.attempt,
                    request.version,
                    joiners_only=request.joiners_only,
                )
        except StaleAttemptError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        if new_source or request.published:
            for news in self._streams.values():
                news.set()
        return pb.UpdatePlan(
            epoch=self.registry.epoch,
            version=request.version,
            engines=[
                pb.EngineMember(member=member_of(e), generation=e.generation) for e in engines
            ],
        )

    async def ReportPhase(
        self, request: pb.PhaseReport, context: grpc.aio.ServicerContext
    ) -> pb.PhaseAck:
        try:
            self.registry.fence(request.source, request.attempt)
        except StaleAttemptError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        gone = [report.engine for report in request.engines if not self._passed(request, report)]
        self.updates.passed(phase_name(request.phase), time.monotonic())
        return pb.PhaseAck(gone=gone)

    def _passed(self, request: pb.PhaseReport, report: pb.EngineReport) -> bool:
        """Note one engine's report. True if it is still in the update."""
        entry = self.registry.report(report.engine, report.attempt, report.generation, report.error)
        if report.error:
            phase = phase_name(request.phase)
            metrics.DROPS.labels(phase).inc()
            self._log.warning(
                "engine dropped", engine=report.engine, phase=phase, reason=report.error
            )
        elif entry and request.phase == pb.UPDATE_PHASE_RESUME:
            self.registry.serve(entry, request.version)
        if engine := self.registry.entries.get((report.engine, 0)):
            engine.synchronising = not report.error and request.phase == pb.UPDATE_PHASE_PREPARE
            self.device_time.state(engine, time.monotonic())
        self._wake((report.engine, 0))
        return entry is not None

    async def GetLedger(
        self, request: pb.GetLedgerRequest, context: grpc.aio.ServicerContext
    ) -> pb.Ledger:
        now = time.monotonic()
        joiners_to = request.joiners_to if request.HasField("joiners_to") else None
        members = (
            self.registry.members() if joiners_to is None else self.registry.joiners(joiners_to)
        )
        entries = [
            pb.LedgerEntry(
                member=member_of(e),
                state=e.state,
                admitted=e.admitted,
                generation=e.generation,
                seconds_since_heartbeat=now - e.last_heartbeat,
                gauges=e.gauges,
                last_error=e.last_error,
            )
            for e in members
        ]
        seconds = {
            f"{role}/{state}": value
            for (role, state), value in self.device_time.seconds(now).items()
        }
        return pb.Ledger(
            epoch=self.registry.epoch,
            version=self.registry.version,
            entries=entries,
            device_seconds=seconds if joiners_to is None else {},
        )

    async def EpisodePods(
        self, request: pb.EpisodePodsRequest, context: grpc.aio.ServicerContext
    ) -> pb.EpisodePodsResponse:
        before, self._episode_pods = self._episode_pods, request.states
        for name in {*before, *request.states}:
            if before.get(name) != request.states.get(name):
                self._wake((name, 0))
        return pb.EpisodePodsResponse(
            workers=[
                pb.WorkerDemand(name=entry.name, attempt=entry.attempt, demand=entry.episode_pods)
                for entry in self.registry.members("rollout")
                if entry.episode_pods is not None
            ]
        )

    async def expire_forever(self) -> None:
        """Drop silent members.

        If a machine is lost, TCP ends its streams only after many minutes; this timeout is shorter.
        """
        while True:
            await asyncio.sleep(self._member_timeout / 4)
            for entry in self.registry.expire(time.monotonic(), self._member_timeout):
                self.device_time.leave(entry, entry.last_heartbeat)
                metrics.DROPS.labels("silent").inc()
                self._log.warning(
                    "dropped", member=entry.name, of_attempt=entry.attempt, reason=entry.dropped
                )
                self._wake(entry.key)

    def _wake(self, key: tuple[str, int]) -> None:
        """Wake a member's stream: facts about the member may have changed."""
        if news := self._streams.get(key):
            news.set()

    def _arrived(self, role: str) -> None:
        """Wake the calls that wait for a member of this role, or of any role."""
        for awaited_role in (role, ""):
            if arrival := self._arrivals.pop(awaited_role, None):
                arrival.set()

    async def _arrival(self, role: str, seconds: float) -> None:
        """Wait at most `seconds` for a member of this role to join; an empty role means any."""
        arrival = self._arrivals.setdefault(role, asyncio.Event())
        try:
            async with asyncio.timeout(seconds):
                await arrival.wait()
        except TimeoutError:
            return


def phase_name(phase: pb.UpdatePhase) -> str:
    """Return prepare, pause, transfer, verify or resume."""
    return str(pb.UpdatePhase.Name(phase)).removeprefix("UPDATE_PHASE_").lower()


def entry_from(member: pb.Member) -> MemberEntry:
    return MemberEntry(
        role=member.role,
        name=member.name,
        attempt=member.attempt,
        index=member.index,
        address=member.address,
        world_size=max(member.world_size, 1),
        version=member.version,
        info=dict(member.info),
        protocol=member.protocol,
        devices=member.devices,
        starting_seconds=member.starting_seconds,
    )


def member_of(entry: MemberEntry) -> pb.Member:
    return pb.Member(
        role=entry.role,
        name=entry.name,
        attempt=entry.attempt,
        index=entry.index,
        address=entry.address,
        world_size=entry.world_size,
        version=entry.version,
        info=entry.info,
        protocol=entry.protocol,
        devices=entry.devices,
        starting_seconds=entry.starting_seconds,
    )
