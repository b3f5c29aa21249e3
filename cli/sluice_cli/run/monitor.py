"""Ask a running job for its state: the rendezvous for its members, the buffer for its data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from sluice.telemetry import run_directory, steady
from sluice.telemetry.goodput import DeviceSeconds
from sluice.wire import queries, rpc
from sluice.wire.tls import PLAIN, Tls
from sluice.wire.v1 import buffer_pb2, rendezvous_pb2

CALL_SECONDS = 3.0


@dataclass(slots=True)
class ServiceSnapshot:
    """Answers of a job's services; None if a service does not answer."""

    stats: buffer_pb2.BufferStats | None = None
    ledger: rendezvous_pb2.Ledger | None = None
    time: float = field(default_factory=steady.seconds)

    def states(self) -> dict[str, str]:
        """Map the name of each member to what it does, in one word."""
        entries = self.ledger.entries if self.ledger else []
        return {
            entry.member.name: entry.state or "serving"
            for entry in entries
            # A replica on several nodes has a member for each; the first one speaks for it.
            if entry.member.index == 0 and "master" not in entry.member.role
        }


class Monitor:
    """Takes snapshots of a job over open channels, and finds the buffer again after it moved."""

    def __init__(self, timeline: Path | None = None) -> None:
        self._timeline = timeline
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.latest = ServiceSnapshot()
        self.devices = DeviceSeconds()

    async def take_snapshot(self, rendezvous: str, token: str, tls: Tls = PLAIN) -> ServiceSnapshot:
        """Take a new snapshot.

        A service that does not answer is missing in the snapshot. Raises AioRpcError only if a
        service refuses the token.
        """
        snapshot = ServiceSnapshot()
        try:
            snapshot.ledger = await queries.ledger(
                self._channel(rendezvous, tls), token, CALL_SECONDS
            )
            if address := queries.buffer_address(snapshot.ledger):
                snapshot.stats = await queries.stats(
                    self._channel(address, tls), token, CALL_SECONDS
                )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise
        # Members report their device time to the rendezvous.
        if snapshot.ledger:
            self.devices.add(snapshot.ledger.device_seconds)
        if snapshot.stats is None:  # the buffer is durable, so its last statistics stay true
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

    def _channel(self, address: str, tls: Tls) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = rpc.channel(address, tls)
        return self._channels[address]
