"""The sharing of GPUs between trainer and engines (`trainer.colocate`); otherwise a no-op.

While the trainer holds the GPUs, engines have ended their requests and freed their memory. While
engines hold them, the trainer's memory is offloaded to the host. During a weight update the engines
have memory for weights only, and the trainer keeps only the weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sluice_trainer.backend import Weights
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.loop.clients import Clients


@dataclass(slots=True)
class GpuSharing:
    """Moves the GPUs between trainer and engines.

    `times` receives the duration of each handover and the memory in use, under names of metrics.
    """

    policy: Weights
    clients: Clients
    ranks: Ranks
    times: dict[str, float]
    colocated: bool
    trainer_holds_gpus: bool = True

    def acquire(self, *, weights_only: bool = False) -> None:
        """Put the engines to rest and restore what was offloaded. Collective."""
        if not self.colocated:
            return
        started = time.perf_counter()
        if not self.trainer_holds_gpus:
            self.record_memory("generating")
            if self.ranks.rank == 0:
                self.clients.member.set_state("taking_turn")
                self.clients.engines.rest()
            # A barrier: no rank may allocate before all engines have freed their memory.
            self.ranks.gather(None)
            self.record_memory("resting")
            self.trainer_holds_gpus = True
        self.policy.restore(weights_only=weights_only)
        # A step may acquire the GPUs twice; only the first time has engines to wait for.
        self.times.setdefault("perf/wake_up_time", time.perf_counter() - started)

    def acquire_for_weights(self) -> None:
        """Acquire the GPUs but keep only the weights, so that engines have memory for theirs.

        Collective.
        """
        if self.colocated:
            self.acquire(weights_only=True)
            self.policy.offload(weights=False)

    def release(self) -> None:
        """Offload everything for the engines, which have received all weights."""
        started = time.perf_counter()
        self.record_memory("publishing")
        self.policy.offload(weights=True)
        self.trainer_holds_gpus = False
        self.times["perf/sleep_time"] = time.perf_counter() - started

    def record_memory(self, phase: str) -> None:
        """Record how much of rank 0's GPU is in use, by trainer and engine together."""
        if self.colocated and (used := self.policy.memory_used()):
            self.times[f"perf/gpu_memory/{phase}_gib"] = used / 2**30
