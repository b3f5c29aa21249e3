"""A learner, which policy and critic are: a model, its optimizer, its way through micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from sluice.api import Optimizer, RLJobSpec
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.batch.sequences import Sequence, TrainSequence
from sluice_trainer.step.packing import Forward, MicroBatch
from sluice_trainer.step.rates import learning_rate, set_learning_rate
from sluice_trainer.step.results import Loss, StepResult


class Learner(ABC):
    """A model, its optimizer and how far it has come. Calls are collective over all ranks."""

    optimizer: Any

    def __init__(self, spec: RLJobSpec, rates: Optimizer, total_steps: int | None) -> None:
        """total_steps: training steps that this model learns in, for its schedule."""
        self.optimizer_steps = 0
        self.rate = 0.0
        """Learning rate of the last optimizer step."""
        self._spec = spec
        self._rates = rates
        self._total = total_steps and total_steps * spec.trainer.steps_per_batch

    def step(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> StepResult:
        """An optimizer step, at the learning rate that is its turn.

        Every data-parallel rank must bring the same number of micro-batches. The result does not
        depend on how sequences are spread over micro-batches and ranks, beyond rounding: each
        token's weight holds the denominators of the whole step, so losses and gradients are sums.
        Raises FloatingPointError where the loss or the gradient is not finite; before the weights
        are touched for a loss.
        """
        self.rate = learning_rate(self.optimizer_steps, self._rates, self._total)
        set_learning_rate(self.optimizer, self.rate)
        result = self._update(batches, forward, loss)
        self.optimizer_steps += 1
        return result

    @abstractmethod
    def _update(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> StepResult:
        """Gradients of all micro-batches, their clipped sum, AdamW."""

    @abstractmethod
    def micro_batches(self, shard: Seq[TrainSequence], totals: BatchTotals) -> list[MicroBatch]:
        """This rank's part of an optimizer step, packed. totals: of the step over all ranks."""

    @abstractmethod
    def compute(self, batches: list[MicroBatch], forward: Forward) -> list[list[Tensor]]:
        """The first of the forward pass's numbers, per micro-batch and member: [response] float32.

        On the CPU, without gradients.
        """

    @abstractmethod
    def score(self, shard: Seq[Sequence], forward: Forward) -> list[Tensor]:
        """The same by sequence of this rank's shard, which may be empty."""


def by_sequence(batches: Seq[MicroBatch], values: Seq[Seq[Tensor]], sequences: int) -> list[Tensor]:
    """Values per micro-batch and member, put into the order of the sequences they are of."""
    result: list[Tensor] = [Tensor()] * sequences
    for batch, rows in zip(batches, values, strict=True):
        for index, row in zip(batch.members, rows, strict=True):
            result[index] = row
    return result
