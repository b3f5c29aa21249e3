"""A learner, which policy and critic are: a Megatron model, its optimizer, its way through
micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sluice.api import Optimizer, RLJobSpec
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.megatron import parallel
from sluice_trainer.megatron.adaptations import DEVICE
from sluice_trainer.megatron.huggingface.config import ModelShape
from sluice_trainer.megatron.model.building import distribute
from sluice_trainer.megatron.model.config import transformer_config
from sluice_trainer.megatron.step.forward import Forward, compute
from sluice_trainer.megatron.step.optimizer import build_optimizer, learning_rate, set_learning_rate
from sluice_trainer.megatron.step.optimizer_step import Loss, StepResult, train_step
from sluice_trainer.megatron.step.packing import MicroBatch, micro_batch, train_micro_batch
from sluice_trainer.sequences import Sequence, TrainSequence, equalise, pack


def model_config(spec: RLJobSpec, shape: ModelShape) -> TransformerConfig:
    """Megatron's configuration of a model of this shape in this job."""
    trainer = spec.trainer
    precision = trainer.precision or ("bf16" if DEVICE.type == "cuda" else "fp32")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return transformer_config(
        shape, trainer.parallelism, dtype=dtype, recompute=trainer.recompute == "full"
    )


def score(
    chunks: list[Any], shard: Seq[Sequence], spec: RLJobSpec, forward: Forward
) -> list[Tensor]:
    """Values of `forward` for each response token: per sequence [response] float32, on the CPU. No
    gradients.

    Collective over all ranks, those without a sequence too.
    """
    split = parallel.row_split()
    batches = [micro_batch(shard, members, DEVICE, split=split) for members in _bins(shard, spec)]
    result: list[Tensor] = [torch.empty(0)] * len(shard)
    for batch, values in zip(batches, compute(chunks, batches, forward), strict=True):
        for index, value in zip(batch.members, values, strict=True):
            result[index] = value
    return result


def _bins(shard: Seq[Sequence], spec: RLJobSpec) -> list[list[int]]:
    """The sequences of each micro-batch. Collective: every data-parallel rank gets the same number
    of them.

    Experts on other ranks wait for everybody's tokens, and the interleaved schedule wants whole
    rounds of stages.
    """
    layout = spec.trainer.parallelism
    bins = pack([len(s.tokens) for s in shard], spec.trainer.max_tokens_per_gpu * layout.context)
    count = max(parallel.largest_over_data_parallel(len(bins)), 1)
    return equalise(bins, count + -count % (layout.pipeline if layout.virtual_pipeline else 1))


class Learner:
    """A model, its optimizer and how far it has come. Calls are collective over all ranks."""

    def __init__(
        self,
        chunks: list[Any],
        config: TransformerConfig,
        spec: RLJobSpec,
        optimizer: Optimizer,
        total_steps: int | None,
    ) -> None:
        """total_steps: training steps that this model learns in, for the learning-rate schedule;
        None: not known.
        """
        self.chunks = distribute(chunks, config)
        self.optimizer = build_optimizer(self.chunks, config, optimizer)
        self.optimizer_steps = 0
        self.rate = 0.0
        """Learning rate of the last optimizer step."""
        self._spec = spec
        self._rates = optimizer
        self._total = total_steps and total_steps * spec.trainer.steps_per_batch

    def micro_batches(self, shard: Seq[TrainSequence], totals: BatchTotals) -> list[MicroBatch]:
        """This rank's part of an optimizer step, packed. totals: of the step over all ranks."""
        aggregation, split = self._spec.algorithm.loss_aggregation, parallel.row_split()
        return [
            train_micro_batch(shard, members, totals, aggregation, DEVICE, split=split)
            for members in _bins(shard, self._spec)
        ]

    def step(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> StepResult:
        """An optimizer step, at the learning rate that is its turn."""
        self.rate = learning_rate(self.optimizer_steps, self._rates, self._total)
        set_learning_rate(self.optimizer, self.rate)
        result = train_step(self.chunks, self.optimizer, batches, forward, loss)
        self.optimizer_steps += 1
        return result


def means(results: Seq[StepResult]) -> dict[str, float]:
    """Of several optimizer steps: means, and the largest of what is named `_max`."""
    count = len(results)
    sums = {name: sum(r.sums[name] for r in results) / count for name in results[0].sums}
    maxima = {name: max(r.maxima[name] for r in results) for name in results[0].maxima}
    return {**sums, **maxima, "grad_norm": sum(r.grad_norm for r in results) / count}
