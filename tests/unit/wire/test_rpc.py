"""Retries, the token, and errors that say what they are about."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest

from sluice.wire import rpc


def failing(*codes: grpc.StatusCode) -> tuple[Callable[[], Awaitable[str]], list[grpc.StatusCode]]:
    """A call that fails with each of these in turn, and then is answered; and what is left of them."""
    left = list(codes)

    async def call() -> str:
        if left:
            raise grpc.aio.AioRpcError(left.pop(0), grpc.aio.Metadata(), grpc.aio.Metadata(), "because")
        return "answer"

    return call, left


async def test_a_peer_that_restarts_is_waited_for() -> None:
    call, left = failing(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert await rpc.retrying(call, what="Stats", seconds=5) == "answer"
    assert left == []


async def test_a_peer_that_does_not_come_is_named() -> None:
    call, left = failing(*[grpc.StatusCode.UNAVAILABLE] * 100)
    started = time.monotonic()
    with pytest.raises(rpc.DeadlineError, match=r"Stats at the buffer: no answer for 0 s \(UNAVAILABLE: because\)"):
        await rpc.retrying(call, what="Stats at the buffer", seconds=0.4)
    assert time.monotonic() - started < 1
    assert len(left) > 90


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED],
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
    assert rpc.metadata() == (("authorization", "Bearer secret"),)
    assert rpc.metadata("other") == (("authorization", "Bearer other"),)
    monkeypatch.delenv(rpc.TOKEN_ENV)
    assert rpc.metadata() == ()


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
