"""A step of AdamW over moments in bf16, in one pass."""

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
    """Tensors of [n], the first two float32, moments float32 or bf16. step: those taken before.

    An element's threshold is its place in its piece times `golden`, plus `offset`, cut off at 32
    bits, without its lower half.
    """
    beta1, beta2 = group["betas"]
    count, lr = len(weights), group["lr"]
    # Triton's interpreter has no bf16, and the kernel needs nothing but its bits.
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
