"""Where the samples of a batch come from, if not from rollout workers: the buffer makes them once
it is asked for.

They go through the same transitions that workers drive, so all that holds of samples holds of
these: order, epochs, exactly once, the same batch after a rewind.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from sluice.api import RLJobSpec
from sluice_buffer.rules.admission import AdmissionPolicy
from sluice_buffer.sources.answers import Answers
from sluice_buffer.sources.prompts import Prompts
from sluice_buffer.sources.replay import Replay
from sluice_buffer.state.memory import Memory
from sluice_buffer.transitions.leases import Leases
from sluice_buffer.transitions.submits import Submits


class LocalSource(Protocol):
    """Makes the samples of batches."""

    evaluates: bool
    """True where there may be engines for evaluations."""

    def limit(self, policy: AdmissionPolicy) -> AdmissionPolicy:
        """The job's policy, where its samples are made here."""

    def prepare(self, memory: Memory, policy: AdmissionPolicy) -> Future[None] | None:
        """Begin with what the next batch needs, on a thread of its own; None: nothing."""

    def fill(
        self,
        step: int,
        memory: Memory,
        leases: Leases,
        submits: Submits,
        free_bytes: Callable[[], int],
    ) -> None:
        """Hand in the groups of batch `step`, if nobody did before.

        free_bytes: bytes that may still be stored.
        """

    def close(self) -> None:
        """End what `ahead` began."""


def local_source_of(spec: RLJobSpec, prompts: Prompts) -> LocalSource | None:
    """None: rollout workers make the samples. Raises ConfigurationError."""
    if spec.debug.replay:
        return Replay.of(Path(spec.debug.replay))
    return Answers.of(spec, prompts) if spec.algorithm.sft else None
