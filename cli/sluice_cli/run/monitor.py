"""Asks a running job how it is: the buffer for the data, the rendezvous for the members. One
snapshot a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from sluice.telemetry import run_directory, steady
from sluice.telemetry.goodput import DeviceSeconds
from sluice.wire import queries as ask
from sluice.wire import rpc
from sluice.wire.tls import PLAIN, Tls
from sluice.wire.v1 import buffer_pb2, rendezvous_pb2

CALL_SECONDS = 3.0


@dataclass(slots=True)
class Snapshot:
    """The last answers of a job; None where nobody answers."""

    stats: buffer_pb2.BufferStats | None = None
    ledger: rendezvous_pb2.Ledger | None = None
    time: float = field(default_factory=steady.seconds)

    def states(self) -> dict[str, str]:
        """Member name -> what it does, in one word."""
        entries = self.ledger.entries if self.ledger else []
        return {
            e.member.name: e.state or "serving"
            for e in entries
            if e.member.index == 0 and "master" not in e.member.role
        }


class Monitor:
    """Keeps its channels; finds the buffer again after it has moved."""

    def __init__(self, timeline: Path | None = None) -> None:
        self._timeline = timeline
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.latest = Snapshot()
        self.devices = DeviceSeconds()

    async def ask(self, rendezvous: str, token: str, secured: Tls = PLAIN) -> Snapshot:
        """A new snapshot. Raises nothing: a service that is away is part of the picture."""
        snapshot = Snapshot()
        try:
            snapshot.ledger = await ask.ledger(
                self._channel(rendezvous, secured), token, CALL_SECONDS
            )
            if address := ask.buffer_address(snapshot.ledger):
                snapshot.stats = await ask.stats(
                    self._channel(address, secured), token, CALL_SECONDS
                )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise
        if snapshot.ledger:
            self.devices.add(snapshot.ledger.device_seconds)
        if snapshot.stats is None:  # what the buffer last said stays true: it is durable
            snapshot.stats = self.latest.stats
        self.latest = snapshot
        if self._timeline and snapshot.states():
            run_directory.append(
                self._timeline, {"time": snapshot.time, "states": snapshot.states()}
            )
        return snapshot

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def _channel(self, address: str, secured: Tls) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = rpc.channel(address, secured)
        return self._channels[address]
