"""The loss of a micro-batch, against the formula worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from sluice.api import Algorithm
from sluice_trainer.algorithms.objective import LossInputs, Objective, policy_objective

LOG_PROBS = torch.tensor([-1.0, -2.0, -0.5])
ENTROPY = torch.tensor([2.0, 1.0, 9.0])
ADVANTAGES = torch.tensor([1.0, -1.0, 5.0])
WEIGHTS = torch.tensor([0.5, 0.5, 0.0])
ROLLOUT = torch.tensor([-1.1, -1.8, 7.0])


def objective(
    *,
    old: list[float] | None = None,
    ref: list[float] | None = None,
    log_probs: torch.Tensor = LOG_PROBS,
    **spec: object,
) -> Objective:
    inputs = LossInputs(
        advantages=ADVANTAGES,
        loss_weights=WEIGHTS,
        metric_weights=WEIGHTS,
        rollout_log_probs=ROLLOUT,
        old_log_probs=None if old is None else torch.tensor(old),
        ref_log_probs=None if ref is None else torch.tensor(ref),
    )
    return policy_objective(log_probs, ENTROPY, inputs, Algorithm.model_validate(spec))


def test_on_policy_the_ratio_is_exactly_one() -> None:
    sums = objective().sums
    assert sums["ppo_kl"] == 0
    assert sums["pg_clipfrac"] == 0
    assert sums["pg_loss"] == pytest.approx(-0.5 * 1 + 0.5 * 1)


def test_only_metrics_that_apply_are_there() -> None:
    assert set(objective().sums) == {
        "loss",
        "pg_loss",
        "pg_clipfrac",
        "ppo_kl",
        "entropy_loss",
        "train_rollout_logprob_abs_diff",
    }


def test_difference_to_the_engine_counts_unmasked_tokens() -> None:
    result = objective()
    assert float(result.sums["train_rollout_logprob_abs_diff"]) == pytest.approx((0.1 + 0.2) / 2)
    assert float(result.maxima["train_rollout_logprob_abs_diff_max"]) == pytest.approx(0.2)


def test_off_policy_ratio_and_its_metrics() -> None:
    sums = objective(old=[-1.5, -1.5, 0.0]).sums
    # ratios e^0.5 (clipped to 1.2, A = 1) and e^-0.5 (clipped to 0.8, A = -1)
    assert float(sums["pg_loss"]) == pytest.approx(0.5 * -1.2 + 0.5 * 0.8)
    assert float(sums["pg_clipfrac"]) == 1
    assert float(sums["ppo_kl"]) == pytest.approx(0.5 * -0.5 + 0.5 * 0.5)


def test_entropy_lowers_the_loss() -> None:
    sums = objective(entropyCoef=0.1).sums
    assert float(sums["entropy_loss"]) == pytest.approx(1.5)
    assert float(sums["loss"] - sums["pg_loss"]) == pytest.approx(-0.15)


def test_kl_loss() -> None:
    sums = objective(ref=[-2.0, -2.0, 0.0], kl={"lossCoef": 0.5, "type": "k1"}).sums
    assert float(sums["kl_loss"]) == pytest.approx(0.5)
    assert float(sums["loss"] - sums["pg_loss"]) == pytest.approx(0.25)


def test_unbiased_kl_is_weighted_by_the_ratio() -> None:
    sums = objective(
        old=[-1.5, -2.0, 0.0], ref=[-2.0, -2.0, 0.0], kl={"lossCoef": 0.5, "type": "k1", "unbiased": True}
    ).sums
    assert float(sums["kl_loss"]) == pytest.approx(0.5 * math.exp(0.5))


def test_kl_loss_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="lossCoef"):
        objective(kl={"lossCoef": 0.5})


def test_tis_weighs_the_policy_loss() -> None:
    sums = objective(offPolicy={"method": "tis", "low": 0.0, "high": 1.05}).sums
    first, second = math.exp(0.1), math.exp(-0.2)
    assert float(sums["pg_loss"]) == pytest.approx(-0.5 * 1.05 + 0.5 * second)
    assert float(sums["tis"]) == pytest.approx((first + second) / 2)
    assert float(sums["tis_clipfrac"]) == pytest.approx(0.5)
    assert float(sums["tis_abs"]) == pytest.approx((first - 1 + 1 - second) / 2)
    assert float(sums["ois"]) == 1


def test_masked_tokens_get_no_gradient() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    objective(log_probs=log_probs).loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.5, 0.5, 0]


def test_an_empty_micro_batch_has_a_loss_of_zero_with_a_gradient() -> None:
    empty = torch.empty(0)
    log_probs = empty.clone().requires_grad_()
    inputs = LossInputs(empty, empty, empty, empty)
    result = policy_objective(log_probs, empty, inputs, Algorithm())
    result.loss.backward()
    assert result.loss == 0
    assert result.maxima["train_rollout_logprob_abs_diff_max"] == 0
