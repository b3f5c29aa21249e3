"""One optimizer step: forward and backward over micro-batches, gradient sum, clip, AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sluice_trainer.algorithms.objective import LossInputs, Objective
from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.parallel import from_last_stage, reduce_over_data_parallel
from sluice_trainer.megatron.step.forward import Forward, run_schedule
from sluice_trainer.megatron.step.packing import MicroBatch

Loss = Callable[[Tensor, LossInputs], Objective]
"""(what the forward pass gives on the last pipeline stage, inputs) -> objective."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """sums: means over the optimizer step, reduced over ranks; maxima likewise; grad_norm: before
    clipping.
    """

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float


@megatron_device()
def train_step(
    chunks: list[Any], optimizer: Any, batches: list[MicroBatch], forward: Forward, loss: Loss
) -> StepResult:
    """Train on this rank's micro-batches. Every data-parallel rank must bring the same number.
    Collective.

    The result does not depend on how sequences are spread over micro-batches and ranks, beyond
    rounding: each token's weight holds the denominators of the whole step, so losses and gradients
    are sums, and Megatron is told not to average (`calculate_per_token_loss`, with its division by
    a token count left out). Raises FloatingPointError where the loss or the gradient is not finite;
    before the weights are touched for a loss.
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
    sums = reduce_over_data_parallel(
        _total([o.sums for o in objectives], torch.sum), dist.ReduceOp.SUM
    )
    maxima = reduce_over_data_parallel(
        _total([o.maxima for o in objectives], torch.amax), dist.ReduceOp.MAX
    )
    sums, maxima = from_last_stage((sums, maxima))
    if not math.isfinite(sums["loss"]):
        raise FloatingPointError(f"the loss is {sums['loss']}: {sums}")
    _, grad_norm, _ = optimizer.step()
    if not math.isfinite(grad_norm):
        raise FloatingPointError(f"the gradient norm is {grad_norm} at a loss of {sums['loss']}")
    return StepResult(sums, maxima, float(grad_norm))


def _total(parts: list[dict[str, Tensor]], reduce: Any) -> dict[str, Tensor]:
    """Combine the scalars of micro-batches, in double precision."""
    if not parts:
        return {}
    return {
        name: reduce(torch.stack([part[name].double() for part in parts]), 0) for name in parts[0]
    }
