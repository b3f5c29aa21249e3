"""The critic of PPO: the policy's architecture with a head of one number."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from sluice.api import Optimizer
from sluice.api.groups.algorithm import Critic as CriticSettings
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.algorithms.objective import LossInputs, Objective, value_objective
from sluice_trainer.batch.sequences import Sequence, TrainSequence
from sluice_trainer.step.learner import Learner
from sluice_trainer.step.packing import Forward
from sluice_trainer.step.results import means


class CriticModel:
    """A model of the value at each response token. Calls are collective.

    Parameters
    ----------
    settings
        `algorithm.critic`.
    learner
        The model with its optimizer.
    forward
        (model, micro-batch) -> [1, r] values.

    """

    def __init__(self, settings: CriticSettings, learner: Learner, forward: Forward) -> None:
        self.settings = settings
        self.learner = learner
        self._forward = forward

    def values(self, shard: Seq[Sequence]) -> list[Tensor]:
        """Return the value of the state before each response token: [response] float32, CPU."""
        return self.learner.score(shard, self._forward)

    def train(self, parts: Seq[Seq[TrainSequence]], totals: Seq[BatchTotals]) -> dict[str, float]:
        """Train the values towards the sequences' returns; metrics have verl's names.

        Parameters
        ----------
        parts
            This rank's sequences of each optimizer step.
        totals
            Totals of each optimizer step over all ranks.

        """
        learner, clip = self.learner, self.settings.clip

        def loss(output: Tensor, inputs: LossInputs) -> Objective:
            return value_objective(output[0], inputs, clip=clip)

        results = [
            learner.step(learner.micro_batches(shard, total), self._forward, loss)
            for shard, total in zip(parts, totals, strict=True)
        ]
        metrics = means(results) | {"lr": learner.rate}
        return {f"critic/{name}": value for name, value in metrics.items() if name != "loss"}


def rates(settings: CriticSettings, policy: Optimizer) -> Optimizer:
    """Return the critic's optimizer settings: the policy's with the critic's learning rates."""
    return policy.model_copy(update={"lr": settings.lr, "min_lr": settings.min_lr})
