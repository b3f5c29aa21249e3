"""Tokens to several places each and back, by gathers alone.

Megatron adds what comes back from a token's experts into the token one element at a time
(`scatter_add_`), and its gradients on the way there likewise (`index_add_`): in bf16, and in an
order that a GPU does not repeat. Here a token knows the rows that it has gone to, and its sum is
read from them: once, in float32, in the same order each time.
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
    """One row for each choice of a token: column by column, and the tokens of a column in their
    order.
    """

    source: Tensor
    """[rows] int64: the token of each row."""
    column: Tensor
    """[rows] int64: the column of each row."""
    places: Tensor
    """[tokens, most] int64: the rows of each token, ascending; the number of rows where it has no
    more."""
    counts: Tensor
    """[columns] int64: the rows of each column."""


def routes(chosen: Tensor, rows: int, most: int) -> Routes:
    """The routes of tokens to the columns that each has chosen.

    chosen: [tokens, columns] bool, of which `rows` are true in all and at most `most` for a token.
    That the caller knows both saves a GPU from being waited for.
    """
    tokens, columns = chosen.shape
    counts = chosen.sum(0)
    within = chosen.T.contiguous().cumsum(1).T - 1
    place = torch.where(chosen, counts.cumsum(0) - counts + within, rows)
    places = place.topk(most, largest=False, sorted=True).values
    token = torch.arange(tokens, device=chosen.device)[:, None].expand(-1, most)
    # What is not a place writes behind the rows.
    source = token.new_zeros(rows + 1).scatter_(0, places.flatten(), token.flatten())[:rows]
    column = torch.arange(columns, device=chosen.device).repeat_interleave(counts, output_size=rows)
    return Routes(source, column, places, counts)


def pick(values: Tensor, by: Routes) -> Tensor:
    """The value of each row's token for the row's column. values: [tokens, columns, ...]. Gives
    [rows, ...].
    """
    return values.flatten(0, 1).index_select(0, by.source * values.shape[1] + by.column)


def spread(tokens: Tensor, by: Routes) -> Tensor:
    """A row of its own for each choice. tokens: [tokens, h]. Gives [rows, h]."""
    rows: Tensor = _Spread.apply(tokens, by.source, by.places)  # type: ignore[no-untyped-call]
    return rows


def combine(rows: Tensor, by: Routes) -> Tensor:
    """The sum of each token's rows, added in float32. rows: [rows, h]. Gives [tokens, h]."""
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
    """rows: [rows, h]; places: [tokens, most]. Gives [tokens, h]."""
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
