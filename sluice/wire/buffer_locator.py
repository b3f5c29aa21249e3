"""Finds the buffer again after it was restarted at another address."""

from __future__ import annotations

import grpc.aio

from sluice.wire import membership, rpc
from sluice.wire.v1 import buffer_pb2_grpc


class BufferLocator:
    """The buffer's stub.

    Its address is looked up only if none is known to work, so a caller can go on without the
    rendezvous.
    """

    def __init__(self, rendezvous: str) -> None:
        self._rendezvous = rendezvous
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stub: buffer_pb2_grpc.BufferStub | None = None

    async def stub(self, seconds: float) -> buffer_pb2_grpc.BufferStub:
        """Return the stub; look the address up for at most `seconds` if it is not known."""
        if self._stub is None:
            address = (await membership.find_members(self._rendezvous, "buffer", seconds=seconds))[
                0
            ].address
            # An older channel stays open: closing it would cancel calls that are just finding out
            # that it is dead.
            if address not in self._channels:
                self._channels[address] = rpc.channel(address)
            self._stub = buffer_pb2_grpc.BufferStub(self._channels[address])
        return self._stub

    def lost(self, stub: buffer_pb2_grpc.BufferStub) -> None:
        """Look the address up again after a failed call: the buffer may have moved."""
        if self._stub is stub:
            self._stub = None

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels, self._stub = {}, None
