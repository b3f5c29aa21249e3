"""Where the buffer is. It may be restarted elsewhere at any time; whoever calls it follows it."""

from __future__ import annotations

import grpc.aio

from sluice.wire import membership, rpc
from sluice.wire.v1 import buffer_pb2_grpc


class BufferLocator:
    """The buffer's stub. Its address is looked up when there is none that works: with the one that
    it knows, a caller goes on without the rendezvous.
    """

    def __init__(self, rendezvous: str) -> None:
        self._rendezvous = rendezvous
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stub: buffer_pb2_grpc.BufferStub | None = None

    async def stub(self, seconds: float) -> buffer_pb2_grpc.BufferStub:
        """The buffer as far as it is known; else it is looked up, for at most `seconds`."""
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
        """A call broke: the buffer may have moved."""
        if self._stub is stub:
            self._stub = None

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels, self._stub = {}, None
