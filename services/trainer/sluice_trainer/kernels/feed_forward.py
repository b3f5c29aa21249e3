"""Memory passes between the matrix products of a feed-forward layer or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sluice_trainer.kernels import in_triton

# Largest number of channels of a row that one program handles at a time.
COLUMNS = 1024


def gated(up: Tensor, weights: Tensor | None) -> Tensor:
    """Return SwiGLU of `up` [n, 2 f], times each row's weight [n] if there are weights: [n, f].

    It computes in float32 and stores in the precision of `up`.
    """
    return _apply(up, weights)


def sums(rows: Tensor, places: Tensor) -> Tensor:
    """Return the sum of each token's rows, added in float32 in the order of `places`.

    Parameters
    ----------
    rows
        [rows, h].
    places
        [tokens, most] int64, the rows of each token; unused entries are the number of rows.

    Returns
    -------
    [tokens, h].

    """
    rows = rows.contiguous()
    (tokens, most), width = places.shape, rows.shape[1]
    out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
    if tokens:
        columns = _columns(width)
        in_triton().sums_of_rows[(tokens, -(-width // columns))](
            *(rows, places.contiguous(), out, len(rows), width),
            MOST=most,
            COLUMNS=columns,
            num_warps=4,
        )
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, weights: Tensor | None) -> Tensor:
        up, weights = up.contiguous(), None if weights is None else weights.contiguous()
        ctx.save_for_backward(up, weights)
        count, width = up.shape[0], up.shape[1] // 2
        out = torch.empty((count, width), dtype=up.dtype, device=up.device)
        if count:
            in_triton().gated_forward[(count,)](
                *(up, weights, out, width),
                WEIGHED=weights is not None,
                COLUMNS=_columns(width),
                num_warps=4,
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        up, weights = ctx.saved_tensors
        count, width = up.shape[0], up.shape[1] // 2
        grad_up, grad_weights = torch.empty_like(up), None
        if weights is not None:
            grad_weights = torch.empty_like(weights)
        if count:
            in_triton().gated_backward[(count,)](
                *(up, weights, grad.contiguous(), grad_up, grad_weights, width),
                WEIGHED=weights is not None,
                COLUMNS=_columns(width),
                num_warps=4,
            )
        return grad_up, grad_weights


def _columns(width: int) -> int:
    return min(1 << (width - 1).bit_length(), COLUMNS)


_apply: Callable[..., Tensor] = _Gated.apply
