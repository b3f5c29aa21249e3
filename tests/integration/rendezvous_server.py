"""The rendezvous in this process, and a trainer's word that an engine holds the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from sluice.wire import rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_rendezvous.service import RendezvousService

DEADLINE = 20.0


class Rendezvous:
    """Starts and stops on one port, as a pod that is replaced does: what it knew is gone each
    time.
    """

    def __init__(self, *, token: str = "", member_timeout: float = 10.0) -> None:
        self._token, self._member_timeout = token, member_timeout
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.service = RendezvousService(member_timeout=self._member_timeout)
        self._server = rpc.server(self._token)
        rendezvous_pb2_grpc.add_RendezvousServicer_to_server(self.service, self._server)
        self.port = rpc.bind(self._server, f"127.0.0.1:{self.port}")
        await self._server.start()
        self._expiry = asyncio.create_task(self.service.expire_forever())

    async def stop(self) -> None:
        self._expiry.cancel()
        await self._server.stop(grace=None)

    async def __aenter__(self) -> Rendezvous:
        await self.start()
        self.channel = rpc.channel(self.address)
        self.stub = rendezvous_pb2_grpc.RendezvousStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.stop()

    async def ledger(self) -> dict[str, pb.LedgerEntry]:
        ledger = await self.stub.GetLedger(
            pb.GetLedgerRequest(), metadata=rpc.metadata(self._token), timeout=10
        )
        return {entry.member.name: entry for entry in ledger.entries}

    async def serve(self, version: int, attempt: int = 1) -> None:
        """Say that every engine holds `version`, as a trainer does after an update."""
        request = pb.BeginUpdateRequest(source="trainer-0", attempt=attempt, version=version)
        plan = await self.stub.BeginUpdate(request, metadata=rpc.metadata(self._token), timeout=10)
        for engine in plan.engines:
            await self.report(engine, version, attempt)

    async def report(
        self, engine: pb.EngineMember, version: int, attempt: int = 1, error: str = ""
    ) -> bool:
        """Report a phase of the update. Returns True if the engine is still in it."""
        engine_report = pb.EngineReport(
            engine=engine.member.name,
            attempt=engine.member.attempt,
            generation=engine.generation,
            error=error,
        )
        report = pb.PhaseReport(
            source="trainer-0",
            attempt=attempt,
            version=version,
            phase=pb.UPDATE_PHASE_RESUME,
            engines=[engine_report],
        )
        answer = await self.stub.ReportPhase(report, metadata=rpc.metadata(self._token), timeout=10)
        return not answer.gone


def engine_member(
    name: str = "rollout-0",
    address: str = "127.0.0.1:1",
    attempt: int = 1,
    version: int = -1,
    world_size: int = 1,
) -> pb.Member:
    return pb.Member(
        role="rollout",
        name=name,
        attempt=attempt,
        address=address,
        world_size=world_size,
        version=version,
    )


async def eventually(
    member: Membership, condition: Callable[[], Any], seconds: float = DEADLINE
) -> None:
    """Wait until news have made `condition` true."""
    async with asyncio.timeout(seconds):
        while True:
            seen = member.news_count
            if condition():
                return
            await member.news(seen)


async def error_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """(status, details) of a call that must fail."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    raise AssertionError("the call was answered")
