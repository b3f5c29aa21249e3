"""A Megatron model that learns: its optimizer, its way through micro-batches."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sluice.api import Optimizer, Parallelism, RLJobSpec
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.batch.sequences import Sequence, TrainSequence, equalise, pack
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.megatron import parallel
from sluice_trainer.megatron.model.building import distribute
from sluice_trainer.megatron.model.config import transformer_config
from sluice_trainer.megatron.step.forward import compute
from sluice_trainer.megatron.step.optimizer import build_optimizer
from sluice_trainer.megatron.step.optimizer_step import train_step
from sluice_trainer.megatron.step.packing import micro_batch, train_micro_batch
from sluice_trainer.model import deterministic
from sluice_trainer.model.huggingface_config import ModelShape
from sluice_trainer.step.learner import Learner, by_sequence
from sluice_trainer.step.micro_batch_size import MicroBatchSize
from sluice_trainer.step.packing import Forward, MicroBatch
from sluice_trainer.step.results import Loss, StepResult


def model_config(spec: RLJobSpec, shape: ModelShape) -> TransformerConfig:
    """Megatron's configuration of a model of this shape in this job."""
    trainer = spec.trainer
    precision = trainer.precision or ("bf16" if DEVICE.type == "cuda" else "fp32")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return transformer_config(
        shape,
        trainer.parallelism,
        dtype=dtype,
        recompute=trainer.recompute,
        recompute_modules=trainer.recompute_modules,
        exact=deterministic.enabled(),
    )


def score(
    chunks: list[Any],
    shard: Seq[Sequence],
    layout: Parallelism,
    size: MicroBatchSize,
    forward: Forward,
) -> list[Tensor]:
    """Values of `forward` for each response token: per sequence [response] float32, on the CPU. No
    gradients.

    Collective over all ranks, those without a sequence too.
    """
    split = parallel.row_split()
    bins = _bins(shard, layout, size)
    batches = [micro_batch(shard, members, DEVICE, split=split) for members in bins]
    return by_sequence(batches, compute(chunks, batches, forward), len(shard))


def _bins(shard: Seq[Sequence], layout: Parallelism, size: MicroBatchSize) -> list[list[int]]:
    """The sequences of each micro-batch. Collective: every data-parallel rank gets the same number
    of them.

    Experts on other ranks wait for everybody's tokens, and the interleaved schedule wants whole
    rounds of stages.
    """
    bins = pack([len(s.tokens) for s in shard], size.tokens * layout.context)
    count = max(parallel.largest_over_data_parallel(len(bins)), 1)
    return equalise(bins, count + -count % (layout.pipeline if layout.virtual_pipeline else 1))


class MegatronLearner(Learner):
    """A Megatron model, its optimizer and how far it has come."""

    def __init__(
        self,
        chunks: list[Any],
        config: TransformerConfig,
        spec: RLJobSpec,
        size: MicroBatchSize,
        optimizer: Optimizer,
        total_steps: int | None,
    ) -> None:
        super().__init__(spec, optimizer, total_steps)
        self._layout, self._size = spec.trainer.parallelism, size
        self.chunks = distribute(chunks, config)
        self.optimizer = build_optimizer(
            self.chunks, config, optimizer, on_host=spec.trainer.optimizer_on_host
        )

    def micro_batches(self, shard: Seq[TrainSequence], totals: BatchTotals) -> list[MicroBatch]:
        aggregation, split = self._spec.algorithm.loss_aggregation, parallel.row_split()
        return [
            train_micro_batch(shard, members, totals, aggregation, DEVICE, split=split)
            for members in _bins(shard, self._layout, self._size)
        ]

    def compute(self, batches: list[MicroBatch], forward: Forward) -> list[list[Tensor]]:
        return compute(self.chunks, batches, forward)

    def score(self, shard: Seq[Sequence], forward: Forward) -> list[Tensor]:
        return score(self.chunks, shard, self._layout, self._size, forward)

    def _update(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> StepResult:
        return train_step(self.chunks, self.optimizer, batches, forward, loss)
