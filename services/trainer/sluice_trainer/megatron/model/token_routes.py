"""Routing of tokens to several rows and back, by gathers only.

Megatron adds the rows of a token's experts to the token element by element (`scatter_add_`), and
likewise their gradients (`index_add_`): in bf16, and in an order that a GPU does not repeat. Here
each token knows its rows, and its sum is read from them: once, in float32, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sluice_trainer.kernels import feed_forward
from sluice_trainer.kernels.compiled import COMPILED


@dataclass(frozen=True)
class Routes:
    """A row for each choice of a token, sorted by column, then by token."""

    # [rows] int64: the token of each row.
    source: Tensor
    # [rows] int64: the column of each row.
    column: Tensor
    # [tokens, most] int64: the rows of each token, ascending; unused entries are the number of
    # rows.
    places: Tensor
    # [columns] int64: the number of rows of each column.
    counts: Tensor


def routes(chosen: Tensor, rows: int, most: int) -> Routes:
    """Return the routes of tokens to the columns that they have chosen.

    The caller knows `rows` and `most`, so the GPU need not be waited for.

    Parameters
    ----------
    chosen
        [tokens, columns] bool.
    rows
        Number of choices in all.
    most
        Largest number of choices of a token.

    """
    tokens, columns = chosen.shape
    counts = chosen.sum(0)
    within = chosen.T.contiguous().cumsum(1).T - 1
    # A choice's row is the start of its column plus its rank in the column.
    place = torch.where(chosen, counts.cumsum(0) - counts + within, rows)
    places = place.topk(most, largest=False, sorted=True).values
    token = torch.arange(tokens, device=chosen.device)[:, None].expand(-1, most)
    # Unused entries write behind the rows.
    source = token.new_zeros(rows + 1).scatter_(0, places.flatten(), token.flatten())[:rows]
    column = torch.arange(columns, device=chosen.device).repeat_interleave(counts, output_size=rows)
    return Routes(source, column, places, counts)


def pick(values: Tensor, by: Routes) -> Tensor:
    """Return the value of each row's token and column.

    [rows, ...]. values: [tokens, columns, ...].
    """
    return values.flatten(0, 1).index_select(0, by.source * values.shape[1] + by.column)


def spread(tokens: Tensor, by: Routes) -> Tensor:
    """Copy each token [tokens, h] to a row for each of its choices [rows, h]."""
    rows: Tensor = _Spread.apply(tokens, by.source, by.places)  # type: ignore[no-untyped-call]
    return rows


def combine(rows: Tensor, by: Routes) -> Tensor:
    """Return the sum of each token's rows, added in float32: [rows, h] -> [tokens, h]."""
    tokens: Tensor = _Combine.apply(rows, by.source, by.places)  # type: ignore[no-untyped-call]
    return tokens


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sums(grad, *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return _sums(rows, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


def _sums(rows: Tensor, places: Tensor) -> Tensor:
    """Sum rows [rows, h] by places [tokens, most]: [tokens, h]."""
    if COMPILED and rows.is_cuda:
        return feed_forward.sums(rows, places)
    if not len(rows) or not len(places):
        return rows.new_zeros(len(places), rows.shape[1])
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(len(places), rows.shape[1], dtype=wide, device=rows.device)
    for place in places.unbind(1):
        row = rows.index_select(0, place.clamp(max=len(rows) - 1)).to(wide)
        total += row.masked_fill_((place == len(rows))[:, None], 0)
    return total.to(rows.dtype)
