"""The interface of a transport: how the bytes of a bucket reach an engine.

`sender` runs the same update protocol over every transport.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.engines.protocol import Control, EngineRefusedError
from sluice_trainer.weights.buckets import Bucket


class TransferError(Exception):
    """A transfer to one engine failed; the message says how."""


# Errors that concern a single engine. torch.distributed raises RuntimeError for a broken
# connection.
FAILURES = (EngineRefusedError, TransferError, TimeoutError, RuntimeError, OSError)


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """An engine that takes part in an update."""

    name: str
    attempt: int
    generation: int
    world_size: int
    control: Control


class Transport(Protocol):
    """Moves buckets to engines."""

    # True if an engine loads buckets one by one, between `begin` and `end`.
    in_session: bool
    # True if a rank sends to its engines one after another over the same link.
    in_turn: bool = False
    # Engines that got the weights of this update from another engine.
    relayed: Collection[str] = ()
    # Engines that should have got the weights from another engine, and the reason why they did not.
    rerouted: Mapping[str, str] = {}

    def plan_routes(self, peers: Sequence[Peer]) -> None:
        """Choose the routes to the engines of an update, all of which have been probed."""
        return

    async def prepare(self, peer: Peer) -> None:
        """Prepare to send to this engine."""

    def announce(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        """Begin to send a bucket while earlier ones are still on their way."""
        return

    async def stage(self, bucket: Bucket, version: int) -> None:
        """Prepare a bucket once, before it is sent to any engine."""

    async def send(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        """Bring a staged bucket into the engine.

        When the call for the last bucket returns, the engine has loaded all of them.
        """

    def downstream(self, name: str) -> Collection[str]:
        """Return the engines that get the weights through this one."""
        return ()

    def is_connecting(self, name: str) -> bool:
        """Return True until the first transfer over a new communicator has arrived."""
        return False

    def abandon(self, name: str) -> None:
        """Close everything that is open to this engine. Never blocks for long, never raises."""
