"""The critic's loss equals the formula, and the explained variance."""

from __future__ import annotations

import pytest
import torch

from sluice.api import Algorithm
from sluice_trainer.algorithms.advantages import moments
from sluice_trainer.algorithms.objective import LossInputs, policy_objective, value_objective
from sluice_trainer.algorithms.value_loss import clipped_value_loss, explained_variance


@pytest.mark.parametrize(
    ("prediction", "old", "goal", "loss", "clipped"),
    [
        (0.5, 0.5, 1.0, 0.125, 0),  # unmoved: (0.5)^2 / 2
        (0.6, 0.5, 1.0, 0.08, 0),  # within the bound
        (1.0, 0.5, 1.0, 0.045, 1),  # on the goal, but too far from before: (0.7 - 1)^2 / 2
        (-1.0, 0.5, 1.0, 2.0, 0),  # away from the goal: the unclipped error is the larger one
        (0.0, 0.5, -1.0, 0.845, 1),  # bounded below: (0.3 + 1)^2 / 2
    ],
    ids=[
        "unmoved",
        "within the bound",
        "too far towards the goal",
        "away from the goal",
        "bounded below",
    ],
)
def test_the_larger_of_the_two_errors_counts(
    prediction: float, old: float, goal: float, loss: float, clipped: int
) -> None:
    value_loss = clipped_value_loss(*(torch.tensor([x]) for x in (prediction, old, goal)), clip=0.2)
    assert value_loss.loss.item() == pytest.approx(loss)
    assert value_loss.clipped.item() == clipped


def test_a_value_beyond_the_bound_has_no_gradient() -> None:
    predictions = torch.tensor([1.0, 0.6], requires_grad=True)
    clipped_value_loss(
        predictions, torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0]), clip=0.2
    ).loss.sum().backward()
    assert predictions.grad is not None
    assert predictions.grad.tolist() == pytest.approx([0, 0.6 - 1])


def test_the_objective_weights_tokens_and_leaves_out_masked_ones() -> None:
    predictions = torch.tensor([0.5, 1.0, 50.0], requires_grad=True)
    weights = torch.tensor([0.5, 0.5, 0.0])
    inputs = LossInputs(
        advantages=torch.zeros(3),
        loss_weights=weights,
        metric_weights=weights,
        rollout_log_probs=torch.zeros(3),
        sequence=torch.zeros(3, dtype=torch.int64),
        values=torch.full((3,), 0.5),
        returns=torch.ones(3),
    )
    result = value_objective(predictions, inputs, clip=0.2)
    result.loss.backward()
    assert (
        float(result.sums["vf_loss"])
        == float(result.sums["loss"])
        == pytest.approx((0.125 + 0.045) / 2)
    )
    assert float(result.sums["vf_clipfrac"]) == 0.5
    assert float(result.sums["vpred_mean"]) == pytest.approx(0.75)
    assert predictions.grad is not None
    assert predictions.grad.tolist() == pytest.approx([0.5 * -0.5, 0, 0])


def test_a_critic_needs_values_and_returns() -> None:
    zero = torch.zeros(1)
    inputs = LossInputs(zero, zero, zero, zero, sequence=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="the values before the step and the returns"):
        value_objective(torch.zeros(1), inputs, clip=0.2)
    assert policy_objective(torch.zeros(1), torch.zeros(1), inputs, Algorithm()).loss == 0


def explained(returns: list[float], values: list[float]) -> float:
    goals, ones = torch.tensor(returns), torch.ones(len(returns))
    return explained_variance(moments(goals, ones), moments(goals - torch.tensor(values), ones))


def test_explained_variance_is_one_for_a_perfect_critic() -> None:
    assert explained([0, 1, 2], [0, 1, 2]) == 1
    assert explained([0, 1, 2], [5, 5, 5]) == pytest.approx(0, abs=1e-4)
    assert explained([0, 1, 2], [2, 1, 0]) == pytest.approx(1 - 4, abs=1e-3)
    assert explained([1, 1], [1, 1]) == 1
