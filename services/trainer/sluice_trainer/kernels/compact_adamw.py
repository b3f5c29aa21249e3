"""An AdamW step with moments in bf16, in one pass over memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sluice_trainer.kernels import in_triton

BLOCK = 2048


def update(
    weights: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    step: int,
    group: dict[str, Any],
    *,
    piece: int,
    golden: int,
    offset: int,
) -> None:
    """Take one step, in place.

    An element's rounding threshold is its position in its piece times `golden`, plus `offset`,
    modulo 2^32; the kernel uses the upper 16 bits.

    Parameters
    ----------
    weights, gradient
        [n] float32.
    moments
        First and second moment, [n] float32 or bf16.
    step
        Number of steps taken before.
    group
        Parameter group: learning rate, betas, eps, weight decay.
    piece, golden, offset
        Constants of the rounding thresholds.

    """
    beta1, beta2 = group["betas"]
    count, lr = len(weights), group["lr"]
    # Triton's interpreter does not support bf16, and the kernel only needs its bits.
    stored = [m.view(torch.int16) if m.dtype == torch.bfloat16 else m for m in moments]
    if count:
        in_triton().compact_adamw[(-(-count // BLOCK),)](
            *(weights, gradient, *stored, count, piece, golden, offset),
            *(1.0 - lr * group["weight_decay"], beta1, beta2, group["eps"]),
            *(lr / (1.0 - beta1 ** (step + 1)), math.sqrt(1.0 - beta2 ** (step + 1))),
            FIRST=stored[0] is not moments[0],
            SECOND=stored[1] is not moments[1],
            BLOCK=BLOCK,
            num_warps=8,
        )
