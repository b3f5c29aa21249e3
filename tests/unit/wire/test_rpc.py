"""Retries, the token, and errors that say what they are about."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest

from sluice.wire import rpc
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc


def failing(
    *codes: grpc.StatusCode, details: str = "because"
) -> tuple[Callable[[], Awaitable[str]], list[grpc.StatusCode]]:
    """Make a call that fails with each code in turn and then succeeds, and return what is left."""
    left = list(codes)

    async def call() -> str:
        if left:
            raise grpc.aio.AioRpcError(
                left.pop(0), grpc.aio.Metadata(), grpc.aio.Metadata(), details
            )
        return "answer"

    return call, left


async def test_a_peer_that_restarts_is_waited_for() -> None:
    call, left = failing(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert await rpc.retrying(call, what="Stats", seconds=5) == "answer"
    assert left == []


async def test_a_peer_that_ends_a_call_while_we_send_is_asked_again() -> None:
    """gRPC has lost what it said."""
    call, left = failing(grpc.StatusCode.INTERNAL, details="Internal error from Core")
    assert await rpc.retrying(call, what="Submit", seconds=5) == "answer"
    assert left == []


class Ledger(rendezvous_pb2_grpc.RendezvousServicer):
    """A rendezvous that answers with a version."""

    def __init__(self, version: int) -> None:
        self._version = version
        self.answers = 0
        self.busy = asyncio.Event()

    async def GetLedger(self, request: pb.GetLedgerRequest, context: object) -> pb.Ledger:
        self.answers += 1
        if self.answers == 200:
            self.busy.set()
        await asyncio.sleep(0.002)
        return pb.Ledger(version=self._version)


async def serving(ledger: Ledger, port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = rpc.server()
    rendezvous_pb2_grpc.add_RendezvousServicer_to_server(ledger, server)
    port = rpc.bind(server, f"127.0.0.1:{port}")
    await server.start()
    return server, port


async def test_calls_that_reach_a_server_as_it_stops_are_repeated_at_the_next_one() -> None:
    """Those that it has not yet taken up when it stops in order end with CANCELLED."""
    ledger = Ledger(version=1)
    old, port = await serving(ledger)
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub = rendezvous_pb2_grpc.RendezvousStub(channel)

        async def call() -> pb.Ledger:
            ledger: pb.Ledger = await stub.GetLedger(
                pb.GetLedgerRequest(), metadata=rpc.metadata(), timeout=30
            )
            return ledger

        async def until_new() -> None:
            while (await rpc.retrying(call, what="GetLedger", seconds=60)).version != 2:
                continue

        callers = [asyncio.create_task(until_new()) for _ in range(100)]
        await ledger.busy.wait()
        await old.stop(2.0)
        new, _ = await serving(Ledger(version=2), port)
        await asyncio.gather(*callers)
        await new.stop(None)


async def test_a_peer_that_does_not_come_is_named() -> None:
    call, left = failing(*[grpc.StatusCode.UNAVAILABLE] * 100)
    with pytest.raises(
        rpc.DeadlineError, match=r"Stats at the buffer: no answer for 0 s \(UNAVAILABLE: because\)"
    ):
        await rpc.retrying(call, what="Stats at the buffer", seconds=0.4)
    assert len(left) > 90


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
    ids=str,
)
async def test_a_refusal_is_not_repeated(code: grpc.StatusCode) -> None:
    call, left = failing(code, code)
    with pytest.raises(rpc.RefusedError, match=f"^Stats: {code.name}: because$"):
        await rpc.retrying(call, what="Stats", seconds=5)
    assert left == [code]


async def test_a_cancelled_wait_ends() -> None:
    call, _ = failing(*[grpc.StatusCode.UNAVAILABLE] * 100)
    waiting = asyncio.create_task(rpc.retrying(call, what="Stats", seconds=60))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_the_token_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rpc.TOKEN_ENV, "secret")
    assert ("authorization", "Bearer secret") in rpc.metadata()
    assert ("authorization", "Bearer other") in rpc.metadata("other")
    monkeypatch.delenv(rpc.TOKEN_ENV)
    assert dict(rpc.metadata()).keys() == {"sluice-protocol", "sluice-release"}


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            rpc.bind(rpc.server(), f"127.0.0.1:{port}")


async def test_a_free_port_is_chosen() -> None:
    server = rpc.server()
    assert rpc.bind(server, "127.0.0.1:0") > 0
    await server.stop(None)
