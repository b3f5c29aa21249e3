"""How a bucket's bytes reach an engine, whichever route they take. The update protocol is the same
for all of them (source.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.engines.protocol import Control, EngineRefusedError
from sluice_trainer.weights.buckets import Bucket


class TransferError(Exception):
    """A transfer to one engine failed. The message says how."""


FAILURES = (EngineRefusedError, TransferError, TimeoutError, RuntimeError, OSError)
"""Errors by one engine. torch.distributed raises RuntimeError for a broken connection."""


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """An engine that takes part in an update."""

    name: str
    attempt: int
    generation: int
    world_size: int
    control: Control


class Transport(Protocol):
    in_session: bool
    """True where an engine loads bucket after bucket, between `begin` and `end`."""
    in_turn: bool = False
    """True where a rank sends to one engine after another, each over the same link."""
    relayed: Collection[str] = ()
    """Engines that got the weights of this update from another engine."""
    rerouted: Mapping[str, str] = {}
    """Engines that another one was to pass them on to, and why that came to nothing."""

    def plan_routes(self, peers: Sequence[Peer]) -> None:
        """Choose the ways to the engines of an update, all of which have said what they can."""
        return

    async def prepare(self, peer: Peer) -> None:
        """Make ready to send to this engine."""

    def announce(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        """Begin to send a bucket behind earlier ones that are still on their way."""
        return

    async def stage(self, bucket: Bucket, version: int) -> None:
        """Once for each bucket, before it is sent to anybody."""

    async def send(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        """Bring a staged bucket into the engine. Once the last one has returned, the engine has
        loaded them all.
        """

    def downstream(self, name: str) -> Collection[str]:
        """Engines that get the weights through this one."""
        return ()

    def is_connecting(self, name: str) -> bool:
        """True until the first transfer to this engine over a new communicator has come."""
        return False

    def abandon(self, name: str) -> None:
        """Give up whatever is open towards this engine. Never blocks for long, never raises."""
