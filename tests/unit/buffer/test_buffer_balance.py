from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_buffer.rules.balance import CostModel, assign, balance, optimizer_steps

lengths = st.lists(st.integers(1, 20_000), max_size=80)
ranks = st.integers(1, 9)


@given(lengths, ranks)
def test_every_sequence_has_one_rank_and_loads_differ_by_at_most_the_longest(
    lengths: list[int], ranks: int
) -> None:
    chosen = balance(lengths, ranks)
    assert len(chosen) == len(lengths)
    assert all(0 <= rank < ranks for rank in chosen)
    loads = [
        sum(n for n, rank in zip(lengths, chosen, strict=True) if rank == r) for r in range(ranks)
    ]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(lengths, ranks)
def test_no_rank_is_empty_when_there_are_enough_sequences(lengths: list[int], ranks: int) -> None:
    assert len(set(balance(lengths, ranks))) == min(ranks, len(lengths))


@given(st.lists(st.just(0), min_size=4, max_size=20), st.integers(1, 4))
def test_empty_sequences_are_spread_as_well(lengths: list[int], ranks: int) -> None:
    counts = Counter(balance(lengths, ranks))
    assert max(counts.values()) - min(counts.values()) <= 1


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.randoms())
def test_optimizer_steps_do_not_depend_on_the_number_of_ranks(
    steps: int, part: int, ranks: int, random: object
) -> None:
    lengths = [17 * i % 11 + 1 for i in range(steps * part)]
    single, many = assign(lengths, steps, 1), assign(lengths, steps, ranks)
    assert (
        [step for step, _ in single]
        == [step for step, _ in many]
        == sorted(step for step, _ in single)
    )
    assert many == assign(lengths, steps, ranks)


def test_a_batch_that_cannot_be_split_is_an_error() -> None:
    with pytest.raises(ValueError, match="7 sequences cannot be split into 2"):
        optimizer_steps(7, 2)


@pytest.mark.parametrize(
    ("n0", "expected"),
    [
        pytest.param(0, [0, 1, 1, 1, 1], id="as many tokens: one against four"),
        pytest.param(400, [0, 1, 1, 1, 1], id="by operations the long one costs more still"),
    ],
)
def test_a_long_sequence_against_short_ones(n0: float, expected: list[int]) -> None:
    assert balance(costs([400, 100, 100, 100, 100], n0), 2) == expected


def costs(lengths: list[int], n0: float) -> list[float]:
    return [CostModel(n0).of(length) for length in lengths]


def test_by_operations_a_long_sequence_outweighs_its_tokens() -> None:
    """Half of 800 tokens are in one sequence: with attention it costs 800, the others 125 each."""
    lengths = [400, 100, 100, 100, 100, 100, 100]
    by_tokens, by_flops = (balance(costs(lengths, n0), 2) for n0 in (0, 400))
    assert by_tokens.count(0) == 2
    assert by_flops.count(0) == 1
    assert costs(lengths, 400)[:2] == [800, 125]


def test_tokens_of_images_cost_the_work_of_the_tower() -> None:
    """Two of four sequences of one length have images: each rank gets one of them."""
    images = [90, 0, 90, 0]
    by_tokens, by_work = (
        balance([CostModel(400, cost).of(100, added) for added in images], 2) for cost in (0.0, 0.5)
    )
    assert by_tokens == [0, 1, 0, 1]
    assert by_work == [0, 0, 1, 1]
    assert CostModel(0, 0.5).of(100, 90) == 145
