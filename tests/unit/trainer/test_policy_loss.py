"""Hand-computed values of the clipped surrogate and the off-policy corrections."""

from __future__ import annotations

import math

import pytest
import torch

from sluice_trainer.algorithms.policy_loss import clipped_surrogate, off_policy_correction


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.5, 2.0, -2.56, 1),  # 1 + high = 1.28
        (0.5, 2.0, -1.0, 0),  # the pessimistic term is the unclipped one
        (1.5, -2.0, 3.0, 0),
        (0.5, -2.0, 1.6, 1),  # 1 - low = 0.8
        (1.28, 2.0, -2.56, 0),
    ],
)
def test_clip(ratio: float, advantage: float, loss: float, clipped: int) -> None:
    result = clipped_surrogate(torch.tensor([ratio]), torch.tensor([advantage]), low=0.2, high=0.28)
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() == clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (10.0, -1.0, 3.0),  # without the dual clip: 10
        (2.0, -1.0, 2.0),
        (10.0, 1.0, -1.2),  # positive advantages are not touched
        (0.1, -1.0, 0.8),
    ],
)
def test_dual_clip_bounds_negative_advantages_only(ratio: float, advantage: float, loss: float) -> None:
    result = clipped_surrogate(torch.tensor([ratio]), torch.tensor([advantage]), low=0.2, high=0.2, dual=3.0)
    assert result.loss.item() == pytest.approx(loss)


def test_a_clipped_token_has_no_gradient() -> None:
    ratio = torch.tensor([1.5, 1.1], requires_grad=True)
    clipped_surrogate(ratio, torch.tensor([1.0, 1.0]), low=0.2, high=0.2).loss.sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0, -1]


RATIOS = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])


def correction(method: str) -> list[list[float]]:
    rollout = torch.full((5,), -1.0)
    result = off_policy_correction(rollout + RATIOS.log(), rollout, method, low=0.5, high=2.0)  # type: ignore[arg-type]
    assert result.ratio.tolist() == pytest.approx(RATIOS.tolist())
    return [result.weight.tolist(), result.bounded.tolist()]


def test_tis_truncates() -> None:
    weight, bounded = correction("tis")
    assert weight == pytest.approx([0.5, 0.5, 1, 2, 2])
    assert (bounded[0], bounded[2], bounded[4]) == (1, 0, 1)


def test_icepop_drops_what_lies_outside() -> None:
    # exp(log) of a bound may miss it by an ulp: ask for what is clearly inside and outside
    weight, bounded = correction("icepop")
    assert (weight[0], weight[2], weight[4]) == (0, 1, 0)
    assert (bounded[0], bounded[2], bounded[4]) == (1, 0, 1)


def test_icepop_keeps_the_bounds_themselves() -> None:
    zero = torch.zeros(1)
    assert off_policy_correction(zero, zero, "icepop", low=1.0, high=2.0).weight.item() == 1
    assert off_policy_correction(zero, zero, "icepop", low=0.0, high=1.0).weight.item() == 1


def test_the_correction_has_no_gradient() -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)
    result = off_policy_correction(log_probs, torch.tensor([math.log(0.5)]), "tis", low=0, high=2)
    assert not result.weight.requires_grad
