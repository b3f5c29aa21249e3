"""The rendezvous over gRPC: streams in, registry, streams out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from sluice.telemetry import logs
from sluice.wire.membership import HEARTBEAT_SECONDS
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_rendezvous.registry import Entry, Registry, StaleAttemptError

MEMBER_TIMEOUT_SECONDS = 5 * HEARTBEAT_SECONDS
MAX_WAIT_SECONDS = 60.0


class RendezvousService(rendezvous_pb2_grpc.RendezvousServicer):  # type: ignore[misc]
    """All calls run on one event loop, so that the registry needs no lock."""

    def __init__(self, member_timeout: float = MEMBER_TIMEOUT_SECONDS) -> None:
        self.registry = Registry(first_generation=int(time.time() * 1000))
        self._member_timeout = member_timeout
        self._changed = asyncio.Condition()
        self._changes = 0
        self._log = logs.get()

    async def Join(  # noqa: N802 - gRPC's name
        self, requests: AsyncIterator[pb.MemberMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ServerMessage]:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("body") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
            return
        try:
            entry = self.registry.join(entry_from(first.hello), time.monotonic())
        except StaleAttemptError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            return
        connection = entry.connection
        self._log.info(
            "joined", member=entry.name, of_attempt=entry.attempt, address=entry.address, epoch=self.registry.epoch
        )
        await self._notify()
        reader = asyncio.create_task(self._read(requests, entry.key, connection))
        try:
            async for message in self._messages(entry.key, connection, reader):
                yield message
        finally:
            reader.cancel()
            if self.registry.leave(entry.key, connection):
                self._log.info("left", member=entry.name, of_attempt=entry.attempt, epoch=self.registry.epoch)
                await self._notify()

    async def _read(self, requests: AsyncIterator[pb.MemberMessage], key: tuple[str, int], connection: int) -> None:
        async for message in requests:
            beat = message.heartbeat
            self.registry.heartbeat(key, connection, time.monotonic(), beat.state, beat.version, dict(beat.gauges))

    async def _messages(
        self, key: tuple[str, int], connection: int, reader: asyncio.Task[None]
    ) -> AsyncIterator[pb.ServerMessage]:
        """What this member should know, whenever it changes, until it goes or is replaced."""
        sent: pb.ServerMessage | None = None
        while not reader.done():
            seen = self._changes
            entry = self.registry.entries.get(key)
            if entry is None or entry.connection != connection:
                return
            message = pb.ServerMessage(
                epoch=self.registry.epoch,
                admitted=entry.admitted,
                version=entry.version,
                dropped=entry.dropped,
                heartbeat_seconds=HEARTBEAT_SECONDS,
            )
            if message != sent:
                yield message
                sent = message
            await self._wait(seen, HEARTBEAT_SECONDS)

    async def AddressBook(  # noqa: N802
        self, request: pb.AddressBookRequest, context: grpc.aio.ServicerContext
    ) -> pb.AddressBookResponse:
        deadline = time.monotonic() + min(request.wait_seconds, MAX_WAIT_SECONDS)
        while True:
            seen = self._changes
            members = self.registry.members(request.role, request.attempt)
            left = deadline - time.monotonic()
            if len(members) >= request.at_least or left <= 0:
                return pb.AddressBookResponse(epoch=self.registry.epoch, members=[member_of(e) for e in members])
            await self._wait(seen, left)

    async def BeginUpdate(  # noqa: N802
        self, request: pb.BeginUpdateRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdatePlan:
        try:
            engines = self.registry.begin_update(
                request.source, request.attempt, request.version, joiners_only=request.joiners_only
            )
        except StaleAttemptError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.UpdatePlan(
            epoch=self.registry.epoch,
            version=request.version,
            engines=[pb.EngineMember(member=member_of(e), generation=e.generation) for e in engines],
        )

    async def ReportPhase(self, request: pb.PhaseReport, context: grpc.aio.ServicerContext) -> pb.PhaseAck:  # noqa: N802
        try:
            self.registry.fence(request.source, request.attempt)
        except StaleAttemptError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        key = (request.engine, 0)
        present = self.registry.report(key, request.engine_attempt, request.generation, request.error)
        phase = pb.UpdatePhase.Name(request.phase).removeprefix("UPDATE_PHASE_").lower()
        if request.error:
            self._log.warning("engine dropped", engine=request.engine, phase=phase, reason=request.error)
        elif present and request.phase == pb.UPDATE_PHASE_RESUME:
            self.registry.serve(key, request.version)
        await self._notify()
        return pb.PhaseAck(go_on=present)

    async def EndUpdate(  # noqa: N802
        self, request: pb.EndUpdateRequest, context: grpc.aio.ServicerContext
    ) -> pb.EndUpdateResponse:
        return pb.EndUpdateResponse(epoch=self.registry.epoch, in_sync=self.registry.in_sync())

    async def GetLedger(self, request: pb.GetLedgerRequest, context: grpc.aio.ServicerContext) -> pb.Ledger:  # noqa: N802
        now = time.monotonic()
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
            for e in self.registry.members()
        ]
        return pb.Ledger(epoch=self.registry.epoch, version=self.registry.version, entries=entries)

    async def expire_forever(self) -> None:
        """Drop silent members. A stream whose peer's machine is gone ends only after TCP's patience; this is ours."""
        while True:
            await asyncio.sleep(self._member_timeout / 4)
            for entry in self.registry.expire(time.monotonic(), self._member_timeout):
                self._log.warning("dropped", member=entry.name, of_attempt=entry.attempt, reason=entry.dropped)
                await self._notify()

    async def _notify(self) -> None:
        self._changes += 1
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, since: int, seconds: float) -> None:
        """Wait for a change after number `since`: one that came while an answer was being sent counts."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._changes != since)
        except TimeoutError:
            return


def entry_from(member: pb.Member) -> Entry:
    return Entry(
        role=member.role,
        name=member.name,
        attempt=member.attempt,
        index=member.index,
        address=member.address,
        devices=tuple(member.devices),
        world_size=max(member.world_size, 1),
        version=member.version,
        info=dict(member.info),
    )


def member_of(entry: Entry) -> pb.Member:
    return pb.Member(
        role=entry.role,
        name=entry.name,
        attempt=entry.attempt,
        index=entry.index,
        address=entry.address,
        devices=entry.devices,
        world_size=entry.world_size,
        version=entry.version,
        info=entry.info,
    )
