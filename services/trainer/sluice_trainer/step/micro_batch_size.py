"""The tokens of a micro-batch: fixed by the job, or growing as far as GPU memory allows.

Every process starts small, also after a restart, and grows according to the memory that its steps
use. A step that still runs out of memory ends the process, as it would at any size: the next
attempt may grow the same way and end the same way, and `failurePolicy.maxRestarts` limits how
often. The remedy is a number in `trainer.maxTokensPerGpu`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sluice.api.groups.trainer import MOST_TOKENS, Trainer
from sluice.telemetry import logs
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.memory import headroom
from sluice_trainer.memory.headroom import MemoryProbe, StepMemory, StepWork, next_size
from sluice_trainer.step.packing import MicroBatch


class MicroBatchSize:
    """The number of tokens of a micro-batch, equal on all ranks.

    The size changes only between training steps. Results do not depend on it beyond rounding:
    everything that one pass stores for another (such as the experts of `routingReplay`) is stored
    by sequence, pipelines negotiate the shape of every row, and no CUDA graph is captured.

    Parameters
    ----------
    tokens
        Initial tokens of a micro-batch on each GPU.
    probe
        Measures steps; None: the size is fixed.
    stages
        Stages of the pipeline.

    """

    def __init__(self, tokens: int, probe: MemoryProbe | None = None, *, stages: int = 1) -> None:
        self.tokens = tokens
        self._probe = probe
        self._stages = stages
        self._settled = probe is None
        self._first_step_done = False
        self._work = StepWork(0, 0, stages)

    @classmethod
    def for_trainer(cls, trainer: Trainer) -> MicroBatchSize:
        """Return the size for a job on this process's device."""
        probe = headroom.PROBE if trainer.micro_batches_grow else None
        return cls(trainer.micro_batch_tokens, probe, stages=trainer.parallelism.pipeline)

    def begin_step(self) -> None:
        """Start to measure a training step."""
        self._work = StepWork(0, 0, self._stages)
        if self._probe and not self._settled:
            self._probe.begin()

    def record(self, batches: Seq[MicroBatch]) -> None:
        """Record the micro-batches of an optimizer step on this rank."""
        largest = max(len(batch.tokens) for batch in batches)
        self._work = StepWork(
            max(self._work.tokens, largest), max(self._work.batches, len(batches)), self._stages
        )

    def end_step(self, ranks: Ranks) -> dict[str, float]:
        """Choose the size of the next training step, and return this step's as a metric.

        Collective as long as the size may grow.
        """
        if self._probe is None:
            return {}
        metrics = {"perf/micro_batch_tokens": float(self.tokens)}
        # The process's first step is no evidence: it allocates the optimizer's moments, which later
        # steps count as static memory.
        if self._first_step_done and not self._settled:
            self._decide(ranks, self._probe)
        self._first_step_done = True
        return metrics

    def _decide(self, ranks: Ranks, probe: MemoryProbe) -> None:
        """Take the smallest size of all ranks; keep the size if a rank's step is no evidence."""
        memory = probe.end()
        proposal = next_size(self._work, memory, self.tokens, MOST_TOKENS)
        reports = ranks.gather((proposal, memory))
        sizes = [size for size, _ in reports if size is not None]
        size = min(sizes, default=self.tokens)
        if size > self.tokens and len(sizes) == len(reports):
            self.tokens = size
            # Cached blocks of smaller rows do not fit larger ones and would waste memory.
            probe.release()
            if ranks.rank == 0:
                fullest = max((memory for _, memory in reports), key=lambda m: m.peak / m.usable)
                logs.get().info(_growth_message(size, fullest))
            self._settled = size == MOST_TOKENS
        # A rank has no memory for more: the size is final.
        elif self.tokens in sizes:
            self._settled = True


def _growth_message(size: int, memory: StepMemory) -> str:
    peak, usable = memory.peak / 2**30, memory.usable / 2**30
    return f"micro-batches of {size:,} tokens: a step took {peak:.1f} of {usable:.1f} GiB"
