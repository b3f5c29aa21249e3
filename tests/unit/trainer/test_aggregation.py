"""Weights that make any split of a batch add up to the same number."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice_trainer.algorithms.aggregation import (
    Aggregation,
    BatchTotals,
    metric_aggregation,
    reduce_tokens,
    sequence_average,
    sequence_sum,
    token_weights,
)

# Two sequences of 2 and 3 tokens; the second has one masked token.
MASK = torch.tensor([1, 1, 1, 0, 1])
SEQUENCE = torch.tensor([0, 0, 1, 1, 1])
VALUES = torch.tensor([1.0, 3.0, 10.0, 1000.0, 20.0])
TOTALS = BatchTotals(sequences=2, tokens=4, longest=10, prompts={7: 5, 8: 1, 9: 0})
GROUPS = [7, 8]  # group 7 has three more tokens in other micro-batches; group 9 has 0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", (2 + 15) / 2),
        ("prompt_mean", ((1 + 3) / 5 + (10 + 20) / 1 + 0) / 3),
        ("token_mean", 34 / 4),
        ("token_sum", (4 + 30) / 2),
        ("token_sum_norm", 1.7),
    ],
    ids=["sequence_mean", "prompt_mean", "token_mean", "token_sum", "token_sum_norm"],
)
def test_aggregates_by_hand(aggregation: Aggregation, expected: float) -> None:
    weights = token_weights(MASK, SEQUENCE, TOTALS, aggregation, GROUPS)
    assert float(reduce_tokens(VALUES, weights)) == pytest.approx(expected)


def test_a_sequence_without_unmasked_tokens_adds_zero_but_counts() -> None:
    weights = token_weights(
        torch.tensor([1, 0, 0]), torch.tensor([0, 1, 1]), BatchTotals(2, 1), "sequence_mean"
    )
    assert weights.tolist() == [0.5, 0, 0]


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_a_micro_batch_without_tokens_has_no_weights(aggregation: Aggregation) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert token_weights(empty, empty, BatchTotals(0, 0), aggregation).numel() == 0


def test_masked_values_do_not_count_even_if_infinite() -> None:
    weights = torch.tensor([1.0, 0.0])
    assert float(reduce_tokens(torch.tensor([2.0, float("nan")]), weights)) == 2


def test_metrics_of_sums_are_means() -> None:
    assert metric_aggregation("token_sum") == metric_aggregation("token_sum_norm") == "token_mean"
    assert metric_aggregation("sequence_mean") == "sequence_mean"
    assert metric_aggregation("prompt_mean") == "prompt_mean"


def test_prompt_mean_gives_all_prompts_the_same_weight() -> None:
    """Group 1 has 1 + 3 tokens, group 2 has 2: the loop of the definition."""
    losses = {1: [[4.0], [1.0, 2.0, 5.0]], 2: [[7.0, 9.0]]}
    expected = sum(sum(map(sum, rows)) / sum(map(len, rows)) for rows in losses.values()) / 2
    rows = [(group, row) for group, rows in losses.items() for row in rows]
    values = torch.tensor([value for _, row in rows for value in row])
    sequence = torch.tensor([i for i, (_, row) in enumerate(rows) for _ in row])
    totals = BatchTotals(3, 6, prompts={1: 4, 2: 2})
    weights = token_weights(
        torch.ones(6), sequence, totals, "prompt_mean", [group for group, _ in rows]
    )
    assert float(reduce_tokens(values, weights)) == pytest.approx(expected)
    assert float(weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_branches_together_have_the_weight_of_one_sequence(aggregation: Aggregation) -> None:
    """Sequence 1 is split into two branches of one unmasked token each, in separate calls."""
    whole = token_weights(MASK, SEQUENCE, TOTALS, aggregation, GROUPS)
    parts = [
        token_weights(torch.tensor(mask), torch.zeros(3, dtype=torch.int64), TOTALS, *places)
        for mask in ([1, 0, 0], [0, 0, 1])
        for places in [(aggregation, GROUPS[1:], [1])]
    ]
    assert (parts[0] + parts[1]).tolist() == pytest.approx(whole[2:].tolist())


Masks = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8)


@given(Masks, st.sampled_from(get_args(Aggregation)), st.data())
def test_any_split_into_micro_batches_gives_the_same_aggregate(
    masks: list[list[int]], kind: Aggregation, data: object
) -> None:
    prompts = dict.fromkeys((row % 3 for row in range(len(masks))), 0)
    for row, mask in enumerate(masks):
        prompts[row % 3] += sum(mask)
    totals = BatchTotals(len(masks), sum(map(sum, masks)), longest=6, prompts=prompts)

    def aggregate(rows: list[int]) -> float:
        mask = torch.tensor([m for row in rows for m in masks[row]], dtype=torch.int64)
        sequence = torch.tensor(
            [i for i, row in enumerate(rows) for _ in masks[row]], dtype=torch.int64
        )
        values = torch.tensor([float(row * 10 + t) for row in rows for t in range(len(masks[row]))])
        weights = token_weights(mask, sequence, totals, kind, [row % 3 for row in rows])
        return float(reduce_tokens(values, weights))

    homes = data.draw(st.lists(st.integers(0, 2), min_size=len(masks), max_size=len(masks)))  # type: ignore[attr-defined]
    parts = [[row for row, home in enumerate(homes) if home == part] for part in range(3)]
    assert sum(map(aggregate, parts)) == pytest.approx(aggregate(list(range(len(masks)))), rel=1e-5)


def test_sums_and_means_of_a_sequence_are_repeated_at_its_tokens() -> None:
    values = torch.tensor([1.0, 3.0, 10.0, float("inf"), 20.0])
    assert sequence_sum(values, MASK, SEQUENCE).tolist() == [4, 4, 30, 30, 30]
    assert sequence_average(values, MASK, SEQUENCE).tolist() == [2, 2, 15, 15, 15]


def test_a_sequence_without_unmasked_tokens_has_mean_zero() -> None:
    nothing = torch.zeros(2, dtype=torch.int64)
    assert sequence_average(torch.tensor([5.0, 6.0]), nothing, nothing).tolist() == [0, 0]
    empty = torch.empty(0)
    assert sequence_average(empty, empty, torch.empty(0, dtype=torch.int64)).numel() == 0


def test_the_gradient_of_a_mean_goes_to_unmasked_tokens() -> None:
    values = torch.tensor([1.0, 3.0, 10.0, 7.0, 20.0], requires_grad=True)
    sequence_average(values, MASK, SEQUENCE)[2].backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 0, 0.5, 0, 0.5]
