"""The tokens of a micro-batch: as the job says, or growing as far as the GPUs' memory allows.

Every process begins small, also after a restart, and grows from what its own steps took. A step
that runs out of memory all the same ends the process, as it would at any size: the next attempt
may grow the same way and end the same way, and `failurePolicy.maxRestarts` bounds how often. What
helps then is what always does: a number in `trainer.maxTokensPerGpu`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sluice.api.groups.trainer import MOST_TOKENS, Trainer
from sluice.telemetry import logs
from sluice_trainer.distributed import device
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.memory.headroom import Memory, Ran, next_size
from sluice_trainer.step.packing import MicroBatch


class MicroBatchSize:
    """How many tokens a micro-batch has, the same on all ranks.

    It changes only between training steps. No result depends on it beyond rounding: experts of
    `routingReplay` and all else that one pass keeps for another is kept by sequence, pipelines ask
    for the shape of every row, and no CUDA graph is made of any.
    """

    def __init__(
        self, tokens: int, probe: device.MemoryProbe | None = None, *, stages: int = 1
    ) -> None:
        """tokens: on each GPU, to begin with. probe: measures steps, for micro-batches that grow;
        None: they do not. stages: of the pipeline.
        """
        self.tokens = tokens
        self._probe = probe
        self._stages = stages
        self._settled = probe is None
        self._warm = False
        self._ran = Ran(0, 0, stages)

    @classmethod
    def of(cls, trainer: Trainer) -> MicroBatchSize:
        """The size in this job, on this process's device."""
        probe = device.MEMORY if trainer.micro_batches_grow else None
        return cls(trainer.micro_batch_tokens, probe, stages=trainer.parallelism.pipeline)

    def begin_step(self) -> None:
        """A training step begins."""
        self._ran = Ran(0, 0, self._stages)
        if self._probe and not self._settled:
            self._probe.begin()

    def note(self, batches: Seq[MicroBatch]) -> None:
        """An optimizer step of the training step computes these, on this rank."""
        largest = max(len(batch.tokens) for batch in batches)
        self._ran = Ran(
            max(self._ran.tokens, largest), max(self._ran.batches, len(batches)), self._stages
        )

    def end_step(self, ranks: Ranks) -> dict[str, float]:
        """The training step is done: decide on the next one's size, and tell this one's.

        Collective as long as the size may grow. The process's first step is not looked at: the
        optimizer's moments come into being in it, which the next ones have from the start.
        """
        if self._probe is None:
            return {}
        metrics = {"perf/micro_batch_tokens": float(self.tokens)}
        if self._warm and not self._settled:
            self._decide(ranks, self._probe)
        self._warm = True
        return metrics

    def _decide(self, ranks: Ranks, probe: device.MemoryProbe) -> None:
        """The smallest of all ranks' answers; where one of them does not know, the size stays."""
        memory = probe.end()
        answer = next_size(self._ran, memory, self.tokens, MOST_TOKENS)
        told = ranks.gather((answer, memory))
        answers = [size for size, _ in told if size is not None]
        size = min(answers, default=self.tokens)
        if size > self.tokens and len(answers) == len(told):
            self.tokens = size
            # Blocks of smaller rows are of no use to larger ones, and would lie beside them.
            probe.release()
            if ranks.rank == 0:
                fullest = max((memory for _, memory in told), key=lambda m: m.peak / m.usable)
                logs.get().info(_words(size, fullest))
            self._settled = size == MOST_TOKENS
        elif self.tokens in answers:
            self._settled = True


def _words(size: int, memory: Memory) -> str:
    taken, usable = memory.peak / 2**30, memory.usable / 2**30
    return f"micro-batches of {size:,} tokens: a step took {taken:.1f} of {usable:.1f} GiB"
