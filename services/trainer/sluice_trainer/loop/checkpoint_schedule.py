"""When checkpoints are taken, and what the buffer is told of them.

What the buffer stores is forgotten only once a checkpoint covers it: without one that is taken
early, a buffer without room would wait for room, and the trainer for a batch, for ever.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.telemetry import logs
from sluice_trainer.backend import Weights
from sluice_trainer.checkpoint.checkpoint_directory import path_of
from sluice_trainer.clients.buffer_client import BufferClient
from sluice_trainer.telemetry import metrics


@dataclass(slots=True)
class Saving:
    """The checkpoints of a run. step: of the last one that was begun."""

    spec: RLJobSpec
    policy: Weights
    buffer: BufferClient
    rank: int
    directory: Path
    step: int = -1
    began: float = 0.0
    short_of_room: bool = False
    """The buffer has no room for another batch until a checkpoint covers the last step."""

    def due(self, step: int, last: int) -> bool:
        """True after every so many steps, after the last one, and early where the buffer has no
        room for another batch.
        """
        regular = step % self.spec.checkpoint.every_steps == 0 or step == last
        if self.short_of_room and not regular:
            self.tell_early(step)
        return regular or self.short_of_room

    def tell_early(self, step: int) -> None:
        if self.rank == 0:
            logs.get().warning(
                f"checkpoint {step} is taken early: buffer.storage.size has no room for the "
                f"samples of {self.spec.checkpoint.every_steps} steps (checkpoint.everySteps)"
            )

    def prepare(self) -> None:
        """Begin to get the memory that the first checkpoint is copied to. Collective, while all
        that learns is on the device.
        """
        if self.spec.checkpoint.async_:
            self.policy.reserve_copies()

    def begin(self, step: int) -> None:
        """Write what a checkpoint holds, or copy it to be written beside. It counts once it is
        finished. Collective.
        """
        started = time.perf_counter()
        self.finish(wait=True)
        self.policy.begin_save(self.directory, step, beside=self.spec.checkpoint.async_)
        self.step, self.began = step, started

    def finish(self, *, wait: bool) -> None:
        """Tell the buffer once a checkpoint is durable: it may then forget what the checkpoint
        covers. Collective.
        """
        durable = self.policy.finish_save(self.directory, wait=wait)
        if durable is not None and self.rank == 0:
            self.buffer.commit_checkpoint(durable)
            seconds = time.perf_counter() - self.began
            metrics.checkpoint(durable, seconds, path_of(self.directory, durable))
