"""pass@k and pass^k against values by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from sluice.telemetry.pass_rate import (
    pass_at_k,
    pass_hat_k,
    pass_rates,
    powers_of_two,
    reliability,
)


@pytest.mark.parametrize(("n", "correct", "k", "expected"), [
    (4, 0, 2, 0), (4, 2, 1, 0.5), (4, 2, 2, 1 - 1 / 6), (4, 3, 2, 1), (4, 4, 4, 1), (8, 1, 4, 0.5),
    (5, 2, 3, 1 - 1 / 10), (1, 1, 1, 1),
])  # fmt: skip
def test_pass_at_k_is_unbiased(n: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(expected)


@pytest.mark.parametrize("n", [1, 4, 6])
def test_the_chances_are_shares_of_all_draws(n: int) -> None:
    for correct in range(n + 1):
        answers = [i < correct for i in range(n)]
        for k in range(1, n + 1):
            draws = list(combinations(answers, k))
            assert pass_hat_k(n, correct, k) == pytest.approx(sum(map(all, draws)) / len(draws))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_reliability_needs_several_samples() -> None:
    groups = [[1.0, 0.0, 0.9, 1.0], [0.0, 0.0], [1.0]]
    assert reliability(groups, [1, 2, 8]) == {"pass^2": pytest.approx((1 / 6 + 0) / 2)}


def test_a_rate_is_the_mean_over_the_groups_that_have_enough_samples() -> None:
    groups = [[1.0, 0.0, 0.9, 1.0], [0.0, 0.0], [1.0]]
    rates = pass_rates(groups, [1, 2, 8])
    assert rates == {
        "pass@1": pytest.approx((0.5 + 0 + 1) / 3),
        "pass@2": pytest.approx((1 - 1 / 6 + 0) / 2),
    }


def test_powers_of_two() -> None:
    assert [powers_of_two(n) for n in (0, 1, 6, 8)] == [[], [1], [1, 2, 4], [1, 2, 4, 8]]
