"""The overlong penalty, against its piecewise definition in the paper."""

from __future__ import annotations

import pytest
import torch

from sluice_trainer.algorithms.shaping import overlong_reward


def in_the_paper(length: int, longest: int, buffer: int) -> float:
    """DAPO, equation 13."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


@pytest.mark.parametrize("penalty", [1.0, 0.25])
@pytest.mark.parametrize(
    ("longest", "buffer"), [(16, 4), (16, 16), (7, 1)], ids=["a quarter", "all of it", "one token"]
)
def test_the_penalty_equals_the_definition_in_the_paper(
    longest: int, buffer: int, penalty: float
) -> None:
    lengths = torch.arange(longest + 3)
    expected = [penalty * in_the_paper(n, longest, buffer) for n in lengths.tolist()]
    result = overlong_reward(lengths, longest=longest, buffer=buffer, penalty=penalty)
    assert result.tolist() == pytest.approx(expected)
