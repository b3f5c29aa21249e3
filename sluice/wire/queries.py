"""Read-only questions to a running job: its members and its progress."""

from __future__ import annotations

import grpc.aio

from sluice.wire import rpc
from sluice.wire.v1 import buffer_pb2, buffer_pb2_grpc, rendezvous_pb2, rendezvous_pb2_grpc


async def ledger(
    rendezvous: grpc.aio.Channel, token: str, seconds: float | None = None
) -> rendezvous_pb2.Ledger:
    """Return all members of the rendezvous. Raises grpc.aio.AioRpcError."""
    stub = rendezvous_pb2_grpc.RendezvousStub(rendezvous)
    request = rendezvous_pb2.GetLedgerRequest()
    answer: rendezvous_pb2.Ledger = await stub.GetLedger(
        request, metadata=rpc.metadata(token), timeout=seconds
    )
    return answer


def buffer_address(members: rendezvous_pb2.Ledger) -> str | None:
    """Return the buffer's address, host:port; None if it has not joined."""
    return next(
        (entry.member.address for entry in members.entries if entry.member.role == "buffer"), None
    )


async def stats(
    buffer: grpc.aio.Channel, token: str, seconds: float | None = None
) -> buffer_pb2.BufferStats:
    """Return the buffer's statistics. Raises grpc.aio.AioRpcError."""
    stub = buffer_pb2_grpc.BufferStub(buffer)
    request = buffer_pb2.StatsRequest()
    answer: buffer_pb2.BufferStats = await stub.Stats(
        request, metadata=rpc.metadata(token), timeout=seconds
    )
    return answer
