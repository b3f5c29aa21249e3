"""Queries or keys by the root of their mean square and turned by their tokens' positions, at once.

Normalising and turning are two passes over the same tensor, forward and backward. As one they read
and write it once each, and keep nothing for the backward pass but what goes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sluice_trainer.kernels import in_triton

ROWS = 32
"""Heads of tokens that are computed together."""
PROGRAMS = 1024
"""Programs of a backward pass, each with a part of the weight's gradient."""


def fits(x: Tensor, turned: int) -> bool:
    """True where all channels of heads [.., d] turn, not `turned` of them alone, and their number
    is a power of two.
    """
    width = x.shape[-1]
    return turned == width and width >= 32 and width & (width - 1) == 0 and x.stride(-1) == 1


def norm_and_rotate(
    x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """[t, heads, d] in float32 until it is stored: RMS-normalised times weight [d] (None: as it
    is), then turned. cos, sin: [t, d / 2] float32; channel i makes a pair with i + d / 2.
    """
    return _apply(x, weight, eps, cos, sin)


class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        tokens, heads, width = x.shape
        out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
        if rows := tokens * heads:
            in_triton().rotate_forward[(-(-rows // ROWS),)](
                *(x, weight, cos, sin, out, rows, x.stride(0), x.stride(1), eps),
                NORMED=weight is not None,
                HEADS=heads,
                HALF=width // 2,
                ROWS=ROWS,
                num_warps=4,
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight, cos, sin = ctx.saved_tensors
        tokens, heads, width = x.shape
        of = of if of.stride(-1) == 1 else of.contiguous()
        of_x = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
        rows = tokens * heads
        programs = min(-(-rows // ROWS), PROGRAMS)
        shape = (programs, width) if weight is not None else (0,)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        strides = (x.stride(0), x.stride(1), of.stride(0), of.stride(1))
        if rows:
            in_triton().rotate_backward[(programs,)](
                *(x, weight, cos, sin, of, of_x, parts, rows, *strides, ctx.eps),
                NORMED=weight is not None,
                HEADS=heads,
                HALF=width // 2,
                ROWS=ROWS,
                num_warps=4,
            )
        of_weight = None if weight is None else parts.sum(0).to(weight.dtype)
        return of_x, of_weight, None, None, None


_apply: Callable[..., Tensor] = _NormAndRotate.apply
