"""A learner: a model with its optimizer and its micro-batches, such as the policy or the critic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor, nn

from sluice.api import Optimizer, RLJobSpec
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.batch.sequences import Sequence, TrainSequence
from sluice_trainer.step.packing import Forward, MicroBatch
from sluice_trainer.step.rates import learning_rate, set_learning_rate
from sluice_trainer.step.results import Loss, StepResult


class Learner(ABC):
    """A model with its optimizer and learning-rate schedule. Calls are collective over all ranks.

    Parameters
    ----------
    spec
        Spec of the job.
    rates
        Optimizer settings of this model.
    total_steps
        Training steps in which this model learns, for its schedule; None: not known.

    """

    optimizer: Any

    def __init__(self, spec: RLJobSpec, rates: Optimizer, total_steps: int | None) -> None:
        self.optimizer_steps = 0
        self.rate = 0.0  # learning rate of the last optimizer step
        self._spec = spec
        self._rates = rates
        self._total = total_steps and total_steps * spec.trainer.steps_per_batch

    @property
    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """The modules of this rank."""

    def step(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> StepResult:
        """Make an optimizer step at the learning rate of the schedule.

        The result does not depend on how sequences are split over micro-batches and ranks, beyond
        rounding: the weight of each token holds the denominators of the whole step, so losses and
        gradients are sums.

        Parameters
        ----------
        batches
            Micro-batches, equally many on every data-parallel rank.
        forward
            Forward pass of the model.
        loss
            Loss of a micro-batch.

        Raises
        ------
        FloatingPointError
            The loss or the gradient is not finite. After a bad loss the weights are unchanged.

        """
        self.rate = learning_rate(self.optimizer_steps, self._rates, self._total)
        set_learning_rate(self.optimizer, self.rate)
        result = self._update(batches, forward, loss)
        self.optimizer_steps += 1
        return result

    @abstractmethod
    def _update(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> StepResult:
        """Compute the gradients of all micro-batches, clip their sum, and apply AdamW."""

    @abstractmethod
    def measure(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> dict[str, float]:
        """Return the sums of the loss over the micro-batches of all ranks, without gradients.

        For the parameters see `step`.
        """

    @abstractmethod
    def micro_batches(self, shard: Seq[TrainSequence], totals: BatchTotals) -> list[MicroBatch]:
        """Pack this rank's part of an optimizer step; `totals` are those of all ranks."""

    @abstractmethod
    def compute(self, batches: list[MicroBatch], forward: Forward) -> list[list[Tensor]]:
        """Return the forward pass's first row of numbers, per micro-batch and member.

        Each [response] float32, CPU, without gradients.
        """

    @abstractmethod
    def score(self, shard: Seq[Sequence], forward: Forward) -> list[Tensor]:
        """Return the forward pass's first row of numbers for each sequence of this rank's shard.

        Each [response] float32, CPU, without gradients. The shard may be empty.
        """


def by_sequence(batches: Seq[MicroBatch], values: Seq[Seq[Tensor]], sequences: int) -> list[Tensor]:
    """Reorder values per micro-batch and member into the order of the sequences."""
    result: list[Tensor] = [Tensor()] * sequences
    for batch, rows in zip(batches, values, strict=True):
        for index, row in zip(batch.members, rows, strict=True):
            result[index] = row
    return result
