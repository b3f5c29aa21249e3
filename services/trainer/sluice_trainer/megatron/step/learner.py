"""A Megatron model that learns: micro-batches, optimizer step and scoring."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from sluice.api import Optimizer, Parallelism, RLJobSpec
from sluice_trainer.algorithms.aggregation import Aggregation, BatchTotals
from sluice_trainer.algorithms.objective import Objective
from sluice_trainer.batch.sequences import Sequence, TrainSequence, micro_batch_members
from sluice_trainer.distributed.device import DEVICE, compute_dtype
from sluice_trainer.megatron import parallel
from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.lora import Adapters
from sluice_trainer.megatron.model.building import distribute
from sluice_trainer.megatron.model.config import transformer_config
from sluice_trainer.megatron.model.layout import RowSplit, packing
from sluice_trainer.megatron.parallel import from_last_stage, reduce_over_data_parallel
from sluice_trainer.megatron.step.forward import compute, run_schedule
from sluice_trainer.megatron.step.optimizer import build_optimizer
from sluice_trainer.model import deterministic
from sluice_trainer.model.huggingface_config import ModelShape
from sluice_trainer.step.learner import Learner, by_sequence
from sluice_trainer.step.micro_batch_size import MicroBatchSize
from sluice_trainer.step.packing import Forward, MicroBatch, packed_row, share_of, with_loss
from sluice_trainer.step.results import (
    Loss,
    StepResult,
    check_gradient,
    check_loss,
    largest,
    summed,
)


def model_config(spec: RLJobSpec, shape: ModelShape) -> TransformerConfig:
    """Return Megatron's configuration of a model of this shape in this job."""
    trainer = spec.trainer
    return transformer_config(
        shape,
        trainer.parallelism,
        dtype=compute_dtype(trainer.precision),
        recompute=trainer.recompute,
        recompute_modules=trainer.recompute_modules,
        deterministic=deterministic.enabled(),
    )


def score(
    chunks: list[Any],
    shard: Seq[Sequence],
    layout: Parallelism,
    size: MicroBatchSize,
    forward: Forward,
) -> list[Tensor]:
    """Return values of `forward` for each response token, without gradients. Collective.

    Per sequence [response] float32, on the CPU. Ranks without a sequence must call it too.
    """
    split = parallel.row_split()
    bins = _bins(shard, layout, size)
    batches = [micro_batch(shard, members, DEVICE, split=split) for members in bins]
    return by_sequence(batches, compute(chunks, batches, forward), len(shard))


def _bins(
    shard: Seq[Sequence],
    layout: Parallelism,
    size: MicroBatchSize,
    *,
    whole_samples: bool = False,
) -> list[list[int]]:
    """Assign sequences to micro-batches, the same number on every data-parallel rank. Collective.

    Experts on other ranks wait for all ranks' tokens, and the interleaved schedule needs whole
    rounds of stages.
    """

    def count(own: int) -> int:
        most = max(parallel.largest_over_data_parallel(own), 1)
        return most + -most % (layout.pipeline if layout.virtual_pipeline else 1)

    max_tokens = size.tokens * layout.context
    return micro_batch_members(shard, max_tokens, count, whole_samples=whole_samples)


class MegatronLearner(Learner):
    """A Megatron model, its optimizer and its progress."""

    def __init__(
        self,
        chunks: list[Any],
        config: TransformerConfig,
        spec: RLJobSpec,
        size: MicroBatchSize,
        optimizer: Optimizer,
        total_steps: int | None,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__(spec, optimizer, total_steps)
        self.adapters = adapters
        self._layout, self._size = spec.trainer.parallelism, size
        self.chunks = distribute(chunks, config)
        self.optimizer = build_optimizer(
            self.chunks, config, optimizer, on_host=spec.trainer.optimizer_on_host
        )

    @property
    def modules(self) -> list[nn.Module]:
        return self.chunks

    def micro_batches(self, shard: Seq[TrainSequence], totals: BatchTotals) -> list[MicroBatch]:
        aggregation, split = self._spec.algorithm.loss_aggregation, parallel.row_split()
        return [
            train_micro_batch(shard, members, totals, aggregation, DEVICE, split=split)
            for members in _bins(
                shard, self._layout, self._size, whole_samples=self._spec.algorithm.paired
            )
        ]

    def compute(self, batches: list[MicroBatch], forward: Forward) -> list[list[Tensor]]:
        return compute(self.chunks, batches, forward)

    def score(self, shard: Seq[Sequence], forward: Forward) -> list[Tensor]:
        return score(self.chunks, shard, self._layout, self._size, forward)

    def measure(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> dict[str, float]:
        return measured(self.chunks, batches, forward, loss)

    def _update(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> StepResult:
        with self.adapters.dropping() if self.adapters else nullcontext():
            return train_step(self.chunks, self.optimizer, batches, forward, loss)


@megatron_device()
def train_step(
    chunks: list[Any], optimizer: Any, batches: list[MicroBatch], forward: Forward, loss: Loss
) -> StepResult:
    """Train on this rank's micro-batches, the same number on every data-parallel rank. Collective.

    Megatron is configured not to average (`calculate_per_token_loss`, without its division by a
    token count).

    Parameters
    ----------
    chunks
        Wrapped chunks of the model.
    optimizer
        Megatron's optimizer.
    batches
        This rank's micro-batches.
    forward
        Forward pass.
    loss
        Loss of its output.

    Returns
    -------
    Sums and maxima of the loss statistics over all ranks, and the gradient norm.

    """

    def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Any]:
        batch = next(data)

        def evaluate(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            assert batch.loss is not None
            objective = loss(output, batch.loss)
            # The schedule scales the loss in place, so it gets a copy.
            return (
                objective.loss.clone(),
                torch.zeros([], dtype=torch.int, device=output.device),
                objective,
            )

        return forward(module, batch), evaluate

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    objectives = run_schedule(step, chunks, batches, forward_only=False)
    sums = reduce_over_data_parallel(summed([o.sums for o in objectives]), dist.ReduceOp.SUM)
    maxima = reduce_over_data_parallel(largest([o.maxima for o in objectives]), dist.ReduceOp.MAX)
    sums, maxima = from_last_stage((sums, maxima))
    check_loss(sums)  # before a NaN reaches the weights
    _, grad_norm, _ = optimizer.step()
    check_gradient(grad_norm, sums["loss"])
    return StepResult(sums, maxima, float(grad_norm))


@megatron_device()
@torch.no_grad()
def measured(
    chunks: list[Any], batches: list[MicroBatch], forward: Forward, loss: Loss
) -> dict[str, float]:
    """Return the sums of the loss over all ranks; for the parameters see `train_step`."""

    def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Any]:
        batch = next(data)

        def evaluate(output: Tensor, non_loss_data: bool = False) -> Objective:
            assert batch.loss is not None
            return loss(output, batch.loss)

        return forward(module, batch), evaluate

    objectives: list[Objective] = run_schedule(step, chunks, batches, forward_only=True)
    sums = reduce_over_data_parallel(summed([o.sums for o in objectives]), dist.ReduceOp.SUM)
    result: dict[str, float] = from_last_stage(sums)
    return result


def micro_batch(
    shard: Seq[Sequence],
    members: Seq[int],
    device: torch.device,
    *,
    split: RowSplit | None = None,
) -> MicroBatch:
    """Return this rank's share of the packed row of these members of the shard."""
    split = split or RowSplit()
    layout = partial(packing, device=device, split=split)
    batch = packed_row(shard, members, device, layout, multiple=split.multiple)
    if split.context > 1:
        batch = share_of(batch, split.local(sum(batch.packing.lengths)).to(device))
    batch.packing.experts = batch.experts
    return batch


def train_micro_batch(
    shard: Seq[TrainSequence],
    members: Seq[int],
    totals: BatchTotals,
    aggregation: Aggregation,
    device: torch.device,
    *,
    split: RowSplit | None = None,
) -> MicroBatch:
    """Return this rank's share of a packed row with the inputs of the loss."""
    batch = micro_batch(shard, members, device, split=split)
    return with_loss(batch, shard, totals, aggregation, device)
