from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_buffer.rules.order import Order, permute

GOLDEN = [
    (0, 1, 0),
    (0, 1, 2),
    (0, 1, 1),
    (0, 0, 1),
    (0, 0, 2),
    (0, 0, 4),
    (0, 0, 3),
    (0, 0, 0),
    (1, 0, 2),
    (1, 0, 0),
]
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(st.integers(1, 600), st.integers(0, 2**31 - 1), st.integers(0, 50))
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(i, size, seed, epoch) for i in range(size)) == list(range(size))


def test_permutations_of_other_epochs_differ_and_look_random() -> None:
    first, second = ([permute(i, 10_000, 42, epoch) for i in range(10_000)] for epoch in (0, 1))
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 20
    assert sum(b > a for a, b in pairwise(first)) == pytest.approx(5000, abs=250)


def test_the_order_is_fixed_for_all_time() -> None:
    """A job that was begun with an older image must go on in the same order."""
    order = Order([5, 3], [1.0, 1.0], shuffle=True, seed=42)
    assert [tuple(order.place(i)) for i in range(10)] == GOLDEN


@given(sizes, st.booleans(), st.integers(0, 1000), st.integers(0, 5))
def test_with_weight_1_an_epoch_has_every_row_once(
    sizes: list[int], shuffle: bool, seed: int, epoch: int
) -> None:
    order = Order(sizes, [1.0] * len(sizes), shuffle, seed)
    start = epoch * order.epoch_size
    places = [order.place(i) for i in range(start, start + order.epoch_size)]
    assert {p.epoch for p in places} == {epoch}
    assert sorted((p.source, p.row) for p in places) == [
        (s, r) for s, n in enumerate(sizes) for r in range(n)
    ]


@settings(max_examples=50)
@given(sizes, st.sampled_from([0.3, 0.5, 1.0, 2.0, 2.5]), st.booleans())
def test_no_row_comes_again_before_all_of_its_source_came(
    sizes: list[int], weight: float, shuffle: bool
) -> None:
    order = Order(sizes, [weight] + [1.0] * (len(sizes) - 1), shuffle, 7)
    drawn = [p for p in map(order.place, range(4 * order.epoch_size)) if p.source == 0]
    assert len(drawn) == 4 * order.shares[0]
    if not shuffle:
        assert [p.row for p in drawn] == [i % sizes[0] for i in range(len(drawn))]
    seen: Counter[int] = Counter(p.row for p in drawn)
    assert len(drawn) // sizes[0] <= min(seen[r] for r in range(sizes[0]))
    assert max(seen.values()) <= -(-len(drawn) // sizes[0])


def test_without_shuffle_one_source_comes_in_file_order() -> None:
    order = Order([4], [1.0], shuffle=False, seed=1)
    assert [order.place(i).row for i in range(6)] == [0, 1, 2, 3, 0, 1]


def test_without_shuffle_sources_are_spread_evenly() -> None:
    order = Order([6, 2], [1.0, 1.0], shuffle=False, seed=1)
    assert [order.place(i).source for i in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]
