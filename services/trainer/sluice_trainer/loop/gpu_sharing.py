"""Turns of trainer and engines that share their GPUs (`trainer.colocate`). Elsewhere nothing of it
happens.

In our turn engines rest: they have ended what was left of their work and given their memory away.
In theirs the trainer lies in host memory. Between the two, with weights to publish, the engines
have room for weights and we hold ours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sluice_trainer.backend import Weights
from sluice_trainer.clients.clients import Peers
from sluice_trainer.distributed.ranks import Ranks


@dataclass(slots=True)
class Turns:
    """times: what changing turns took and how much memory was in use, under the names
    of metrics.
    """

    policy: Weights
    peers: Peers
    ranks: Ranks
    times: dict[str, float]
    colocated: bool
    ours: bool = True

    def take(self, *, weights_only: bool = False) -> None:
        """Engines rest, and what was offloaded comes back. Collective."""
        if not self.colocated:
            return
        started = time.perf_counter()
        if not self.ours:
            self.note_memory("generating")
            if self.ranks.rank == 0:
                self.peers.member.state("taking_turn")
                self.peers.engines.rest()
            self.ranks.gather(None)
            self.note_memory("resting")
            self.ours = True
        self.policy.come_back(weights_only=weights_only)
        self.times.setdefault("perf/wake_up_time", time.perf_counter() - started)

    def make_room_for_weights(self) -> None:
        """Take the turn, keep nothing but what is published, so that engines have room for theirs.
        Collective.
        """
        if self.colocated:
            self.take(weights_only=True)
            self.policy.make_room(weights=False)

    def hand_over(self) -> None:
        """Make room for the engines, which have all weights."""
        started = time.perf_counter()
        self.note_memory("publishing")
        self.policy.make_room(weights=True)
        self.ours = False
        self.times["perf/sleep_time"] = time.perf_counter() - started

    def note_memory(self, when: str) -> None:
        """How much of rank 0's GPU is taken, by trainer and engine together."""
        if self.colocated and (used := self.policy.memory_used()):
            self.times[f"perf/gpu_memory/{when}_gib"] = used / 2**30
