"""RMS norm and rotary embedding of queries or keys, in one pass.

As two operations each reads and writes the tensor, forward and backward. The fused kernel reads and
writes it once, and keeps only its inputs for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sluice_trainer.kernels import in_triton

# Rows (heads of tokens) per program.
ROWS = 32
# Programs of a backward pass; each computes a part of the weight's gradient.
PROGRAMS = 1024


def fits(x: Tensor, rotated: int) -> bool:
    """Return True if the kernel supports heads [.., d] of which `rotated` channels rotate.

    All channels must rotate, and their number must be a power of two.
    """
    width = x.shape[-1]
    return rotated == width and width >= 32 and width & (width - 1) == 0 and x.stride(-1) == 1


def norm_and_rotate(
    x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return `x` RMS-normalised and rotated, [t, heads, d].

    It computes in float32 and stores in the precision of `x`.

    Parameters
    ----------
    x
        [t, heads, d].
    weight
        [d], weight of the norm; None: no norm.
    eps
        Epsilon of the norm.
    cos, sin
        [t, d / 2] float32. Channel i is paired with channel i + d / 2.

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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight, cos, sin = ctx.saved_tensors
        tokens, heads, width = x.shape
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grad_x = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
        rows = tokens * heads
        programs = min(-(-rows // ROWS), PROGRAMS)
        shape = (programs, width) if weight is not None else (0,)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        strides = (x.stride(0), x.stride(1), grad.stride(0), grad.stride(1))
        if rows:
            in_triton().rotate_backward[(programs,)](
                *(x, weight, cos, sin, grad, grad_x, parts, rows, *strides, ctx.eps),
                NORMED=weight is not None,
                HEADS=heads,
                HALF=width // 2,
                ROWS=ROWS,
                num_warps=4,
            )
        grad_weight = None if weight is None else parts.sum(0).to(weight.dtype)
        return grad_x, grad_weight, None, None, None


_apply: Callable[..., Tensor] = _NormAndRotate.apply
