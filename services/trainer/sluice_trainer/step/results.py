"""The results of optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sluice_trainer.algorithms.objective import LossInputs, Objective
from sluice_trainer.distributed.device import DEVICE

# (numbers of the forward pass, inputs) -> objective.
Loss = Callable[[Tensor, LossInputs], Objective]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The metrics of an optimizer step, reduced over ranks.

    Attributes
    ----------
    sums
        Means over the optimizer step.
    maxima
        Largest values.
    grad_norm
        Norm of the gradient before clipping.

    """

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float


def summed(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add up the scalars of micro-batches, in double precision."""
    return _total(parts, torch.sum)


def largest(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the largest of the scalars of micro-batches."""
    return _total(parts, torch.amax)


def _total(parts: list[dict[str, Tensor]], reduce: Any) -> dict[str, Tensor]:
    if not parts:
        return {}
    return {name: reduce(torch.stack([p[name].double() for p in parts]), 0) for name in parts[0]}


def check_loss(sums: dict[str, float]) -> None:
    """Raise FloatingPointError if the loss is not finite."""
    if not math.isfinite(sums["loss"]):
        raise FloatingPointError(f"the loss is {sums['loss']}: {sums}")


def check_gradient(norm: float, loss: float) -> None:
    """Raise FloatingPointError if the norm of the gradient is not finite."""
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient norm is {norm} at a loss of {loss}")


def means(results: Seq[StepResult]) -> dict[str, float]:
    """Return the means over optimizer steps, and the largest of the maxima."""
    count = len(results)
    sums = {name: sum(r.sums[name] for r in results) / count for name in results[0].sums}
    maxima = {name: max(r.maxima[name] for r in results) for name in results[0].maxima}
    return {**sums, **maxima, "grad_norm": sum(r.grad_norm for r in results) / count}


def reduced(
    values: dict[str, Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """All-reduce scalars over a group, in one collective. Every rank must hold the same names."""
    if not values:
        return {}
    names = sorted(values)
    flat = torch.stack([values[name].detach().double() for name in names]).to(DEVICE)
    dist.all_reduce(flat, op=op, group=group)
    return dict(zip(names, flat.tolist(), strict=True))
