"""The critic of PPO: the policy's architecture with a head of one number, an optimizer and a
schedule of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from sluice.api import RLJobSpec
from sluice.api.algorithm import Critic as Settings
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.algorithms.objective import LossInputs, Objective, value_objective
from sluice_trainer.megatron.huggingface.config import read_shape
from sluice_trainer.megatron.model.building import build, load_initial
from sluice_trainer.megatron.step.forward import forward_values
from sluice_trainer.megatron.step.learner import Learner, means, model_config, score
from sluice_trainer.sequences import Sequence, TrainSequence


class Critic:
    """A value for each response token, and how it learns. Under the policy's parallel layout; calls
    are collective.
    """

    def __init__(
        self, spec: RLJobSpec, settings: Settings, model_dir: Path, total_steps: int | None
    ) -> None:
        """Build the critic at version 0: from `critic.modelPath`, else as the policy begins.

        A checkpoint of a language model has no value head: it starts at 0, and so do all values.
        """
        self.settings = settings
        self._spec = spec
        directory = Path(settings.model_path) if settings.model_path else model_dir
        shape = replace(read_shape(directory), tied=False, value_head=True)
        config = model_config(spec, shape)
        chunks = build(config, shape)
        drawn = settings.model_path is None and spec.model.init == "random"
        load_initial(chunks, shape, None if drawn else directory, spec.data.seed)
        rates = spec.trainer.optimizer.model_copy(
            update={"lr": settings.lr, "min_lr": settings.min_lr}
        )
        self.learner = Learner(chunks, config, spec, rates, total_steps)

    def values(self, shard: Seq[Sequence]) -> list[Tensor]:
        """The value of the state before each response token: per sequence [response] float32, on
        the CPU.
        """
        return score(self.learner.chunks, shard, self._spec, forward_values)

    def train(self, parts: Seq[Seq[TrainSequence]], totals: Seq[BatchTotals]) -> dict[str, float]:
        """One training step towards the sequences' returns; metrics under verl's names."""
        learner, clip = self.learner, self.settings.clip

        def loss(output: Tensor, inputs: LossInputs) -> Objective:
            return value_objective(output[0], inputs, clip=clip)

        results = [
            learner.step(learner.micro_batches(shard, total), forward_values, loss)
            for shard, total in zip(parts, totals, strict=True)
        ]
        metrics = means(results) | {"lr": learner.rate}
        return {f"critic/{name}": value for name, value in metrics.items() if name != "loss"}
