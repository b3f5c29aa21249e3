"""The schedule of checkpoints: when to take them, and when to report them to the buffer.

The buffer deletes stored samples only once a checkpoint covers them. Without an early checkpoint, a
full buffer would wait for space and the trainer for a batch, forever.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.telemetry import logs
from sluice_trainer.backend import Weights
from sluice_trainer.checkpoint.checkpoint_directory import path_of
from sluice_trainer.checkpoint.checkpoint_store import CheckpointStore
from sluice_trainer.clients.buffer_client import BufferClient
from sluice_trainer.telemetry import metrics


@dataclass(slots=True)
class CheckpointSchedule:
    """The checkpoints of a run.

    Attributes
    ----------
    step
        Step of the last checkpoint that was begun; -1: none.
    buffer_is_full
        The buffer has no space for another batch until a checkpoint covers the last step.

    """

    spec: RLJobSpec
    policy: Weights
    buffer: BufferClient
    rank: int
    directory: Path
    step: int = -1
    buffer_is_full: bool = False
    _began: float = 0.0

    def due(self, step: int, last: int) -> bool:
        """Return whether to save after `step`: on schedule, at the end, or for a full buffer."""
        regular = step % self.spec.checkpoint.every_steps == 0 or step == last
        if self.buffer_is_full and not regular:
            self.warn_early(step)
        return regular or self.buffer_is_full

    def warn_early(self, step: int) -> None:
        """Warn that the checkpoint of `step` is taken early."""
        if self.rank == 0:
            logs.get().warning(
                f"checkpoint {step} is taken early: buffer.storage.size has no room for the "
                f"samples of {self.spec.checkpoint.every_steps} steps (checkpoint.everySteps)"
            )

    def reserve_memory(self) -> None:
        """Begin to allocate the memory of the first checkpoint's copies. Collective.

        Everything that learns must be on the device.
        """
        if self.spec.checkpoint.async_:
            self.policy.reserve_copies()

    def begin(self, step: int) -> None:
        """Write a checkpoint, or with `checkpoint.async` copy what it needs. Collective.

        The checkpoint is valid once `finish` has completed it.
        """
        started = time.perf_counter()
        # Only one checkpoint is written at a time.
        self.finish(wait=True)
        self.policy.begin_save(self.directory, step, background=self.spec.checkpoint.async_)
        self.step, self._began = step, started

    def finish(self, *, wait: bool) -> None:
        """Report a checkpoint to the buffer once it is durable. Collective."""
        durable = self.policy.finish_save(self.directory, wait=wait)
        if durable is not None and self.rank == 0:
            self.buffer.commit_checkpoint(durable)
            seconds = time.perf_counter() - self._began
            metrics.record_checkpoint(durable, seconds, self._size(durable))

    def _size(self, step: int) -> int:
        """Return the bytes of a checkpoint."""
        store = CheckpointStore.of(self.spec.checkpoint.to)
        if store is not None:
            return store.size(step)
        files = path_of(self.directory, step).rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file())
