"""One optimizer step: forward and backward over micro-batches, gradient sum, clip, AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.parallel import from_last_stage, reduce_over_data_parallel
from sluice_trainer.megatron.step.forward import run_schedule
from sluice_trainer.step.packing import Forward, MicroBatch
from sluice_trainer.step.results import (
    Loss,
    StepResult,
    check_gradient,
    check_loss,
    largest,
    summed,
)


@megatron_device()
def train_step(
    chunks: list[Any], optimizer: Any, batches: list[MicroBatch], forward: Forward, loss: Loss
) -> StepResult:
    """Train on this rank's micro-batches, equally many on every data-parallel rank. Collective.

    Megatron is told not to average (`calculate_per_token_loss`, with its division by a token count
    left out).
    """

    def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Any]:
        batch = next(data)

        def evaluate(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            assert batch.loss is not None
            objective = loss(output, batch.loss)
            # The schedule scales the loss in place: hand it a tensor of its own.
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
    check_loss(sums)
    _, grad_norm, _ = optimizer.step()
    check_gradient(grad_norm, sums["loss"])
    return StepResult(sums, maxima, float(grad_norm))
