"""Groups that the buffer makes itself, for jobs without rollout workers.

They pass through the same transitions as groups of workers, so the same promises hold: order,
epochs, exactly once, the same batch after a rewind.
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

    # True if there may be engines for evaluations.
    evaluates: bool

    def limit(self, policy: AdmissionPolicy) -> AdmissionPolicy:
        """Return the job's policy, adapted to this source."""

    def prepare(self, memory: Memory, policy: AdmissionPolicy) -> Future[None] | None:
        """Start preparing the next batch on a separate thread; None if there is no work for it."""

    def fill(
        self,
        step: int,
        memory: Memory,
        leases: Leases,
        submits: Submits,
        free_bytes: Callable[[], int],
    ) -> None:
        """Submit the groups of batch `step`, unless they were submitted before.

        `free_bytes` returns the bytes that may still be stored.
        """

    def close(self) -> None:
        """End the work that `prepare` began."""


def local_source_of(spec: RLJobSpec, prompts: Prompts) -> LocalSource | None:
    """Return the source of a job; None if rollout workers make the samples.

    Raises ConfigurationError.
    """
    if spec.debug.replay:
        return Replay.load(Path(spec.debug.replay))
    return Answers.load(spec, prompts) if spec.algorithm.offline else None
