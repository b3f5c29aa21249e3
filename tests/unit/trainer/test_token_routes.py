"""Routing of tokens to several rows and back, compared with plain loops."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sluice_trainer.megatron.model.token_routes import combine, routes, spread


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draw the columns that tokens choose, zero or more for each, and a bound per token."""
    columns = draw(st.integers(1, 5))
    rows = draw(st.lists(st.sets(st.integers(0, columns - 1)), max_size=7))
    chosen = torch.zeros(len(rows), columns, dtype=torch.bool)
    for token, token_columns in enumerate(rows):
        chosen[token, list(token_columns)] = True
    most = draw(
        st.integers(max((len(token_columns) for token_columns in rows), default=0), columns)
    )
    return chosen, max(most, 1)


@given(choices())
def test_rows_are_sorted_by_column_and_their_sums_return(choice: tuple[Tensor, int]) -> None:
    chosen, most = choice
    by = routes(chosen, int(chosen.sum()), most)
    expected = [
        (token, column)
        for column in range(chosen.shape[1])
        for token in range(len(chosen))
        if chosen[token, column]
    ]
    assert list(zip(by.source.tolist(), by.column.tolist(), strict=True)) == expected
    assert by.counts.tolist() == chosen.sum(0).tolist()
    tokens = torch.randn(len(chosen), 3)
    rows = spread(tokens, by)
    assert torch.equal(rows, tokens[[token for token, _ in expected]])
    weighed = rows * torch.arange(1.0, len(rows) + 1)[:, None]
    sums = torch.zeros_like(tokens).index_add_(0, by.source, weighed)
    torch.testing.assert_close(combine(weighed, by), sums)


@given(choices())
def test_gradients_are_correct(choice: tuple[Tensor, int]) -> None:
    chosen, most = choice
    by = routes(chosen, int(chosen.sum()), most)
    tokens = torch.randn(len(chosen), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: combine(spread(x, by).square(), by), tokens)


def test_sums_of_bf16_are_rounded_once() -> None:
    chosen = torch.ones(1, 3, dtype=torch.bool)
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert combine(rows, routes(chosen, 3, 3)).item() == 258
    assert (rows[0] + rows[1] + rows[2]).item() == 256
