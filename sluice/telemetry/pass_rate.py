"""Estimators of pass@k and pass^k, for evaluations and training batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples drawn from n is correct: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, eq. 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def pass_hat_k(n: int, correct: int, k: int) -> float:
    """Chance that all of k samples drawn from n are correct: C(c, k) / C(n, k).

    Yao et al. 2024, tau-bench, section 3.
    """
    return math.comb(correct, k) / math.comb(n, k)


def reliability(groups: Sequence[Sequence[float]], ks: Iterable[int]) -> dict[str, float]:
    """Return `pass^k` as the mean over the groups with at least k samples.

    k = 1 equals pass@1 and is left out. `groups` holds the rewards of each group; 1 is correct.
    """
    return _rates(groups, (k for k in ks if k > 1), "pass^", pass_hat_k)


def pass_rates(groups: Sequence[Sequence[float]], ks: Iterable[int]) -> dict[str, float]:
    """Return `pass@k` as the mean over the groups with at least k samples.

    `groups` holds the rewards of each group; 1 is correct.
    """
    return _rates(groups, ks, "pass@", pass_at_k)


def _rates(
    groups: Sequence[Sequence[float]],
    ks: Iterable[int],
    name: str,
    chance: Callable[[int, int, int], float],
) -> dict[str, float]:
    rates = {}
    for k in ks:
        scores = [
            chance(len(group), sum(r == 1 for r in group), k) for group in groups if len(group) >= k
        ]
        if scores:
            rates[f"{name}{k}"] = fmean(scores)
    return rates


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... up to n: the k that slime logs."""
    return [1 << i for i in range(n.bit_length()) if 1 << i <= n]
