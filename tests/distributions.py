"""A test of whether counts come from a distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def chi_square_p(counts: Tensor, probs: Tensor) -> float:
    """Return the p-value of Pearson's test. Outcomes that are expected less than 5 times are one.

    counts, probs: of the same outcomes, in any shape.
    """
    expected, order = (probs.flatten().double() * counts.sum()).sort(descending=True)
    observed = counts.flatten().double()[order]
    common = int((expected >= 5).sum())
    joined = [torch.cat((v[:common], v[common:].sum()[None])) for v in (observed, expected)]
    observed, expected = (v[: common + bool(expected[common:].sum() > 0)] for v in joined)
    statistic = ((observed - expected) ** 2 / expected).sum()
    half = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))
