"""Hand-computed KL estimates. With log-prob -1 and reference -2 the difference d is 1."""

from __future__ import annotations

import math

import pytest
import torch

from sluice_trainer.algorithms.kl import KLType, adapted_coef, kl_estimate


def estimate(log_prob: float, ref: float, kind: KLType, ratio: float | None = None) -> float:
    ratios = None if ratio is None else torch.tensor([ratio])
    return float(kl_estimate(torch.tensor([log_prob]), torch.tensor([ref]), kind, ratios))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1)), ("low_var_kl", math.exp(-1))],
    ids=["k1", "k2", "k3", "low_var_kl"],
)
def test_kl_estimates_by_hand(kind: KLType, expected: float) -> None:
    assert estimate(-1, -2, kind) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_equal_policies_have_no_divergence(kind: KLType) -> None:
    assert estimate(-3, -3, kind) == 0


def test_only_low_var_kl_is_clamped() -> None:
    assert estimate(-20, 0, "low_var_kl") == 10
    assert estimate(-20, 0, "k3") == pytest.approx(math.exp(20) - 21, rel=1e-5)


def test_the_ratio_multiplies_before_the_clamp() -> None:
    assert estimate(-1, -2, "k1", ratio=3) == 3
    assert estimate(-4, 0, "low_var_kl", ratio=0.1) == pytest.approx(
        0.1 * (math.exp(4) - 5), rel=1e-5
    )


def test_the_gradient_of_k3_is_one_minus_the_inverse_ratio() -> None:
    log_prob = torch.tensor([-1.0], requires_grad=True)
    kl_estimate(log_prob, torch.tensor([-2.0]), "k3").backward()
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(1 - math.exp(-1))


@pytest.mark.parametrize("log_prob", [-1000.0, -50.0, 1000.0], ids=str)
def test_a_clamped_estimate_has_a_finite_gradient(log_prob: float) -> None:
    """exp(1000) is infinite, and infinity times the clamp's 0 would be no number."""
    value = torch.tensor([log_prob], requires_grad=True)
    estimate = kl_estimate(value, torch.tensor([0.0]), "low_var_kl")
    estimate.backward()
    assert estimate.item() == 10
    assert value.grad is not None
    assert value.grad.item() == 0


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        pytest.param(0.1, 0.5, id="at its target"),
        pytest.param(0.11, 0.5 * (1 + 0.1 * 50 / 1000), id="a little above"),
        pytest.param(9.0, 0.5 * (1 + 0.2 * 50 / 1000), id="far above"),
        pytest.param(0.0, 0.5 * (1 - 0.2 * 50 / 1000), id="none"),
    ],
)
def test_the_coefficient_follows_the_divergence(divergence: float, expected: float) -> None:
    result = adapted_coef(0.5, divergence, 50, target=0.1, horizon=1000)
    assert result == pytest.approx(expected)


def test_the_coefficient_is_never_negative() -> None:
    assert adapted_coef(0.5, 0.0, 10_000, target=0.1, horizon=1000) == 0


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ValueError, match="k9"):
        estimate(0, 0, "k9")  # type: ignore[arg-type]


def test_the_gradient_of_an_unbiased_estimate_also_flows_through_the_ratio() -> None:
    log_prob = torch.tensor([-1.0], requires_grad=True)
    ratio = torch.exp(log_prob - torch.tensor([-1.5]))
    kl_estimate(log_prob, torch.tensor([-2.0]), "k3", ratio).backward()
    # d/dx of r(x) * (exp(-d) - 1 + d) at d = 1: r * k3 + r * (1 - exp(-1))
    expected = math.exp(0.5) * (math.exp(-1) + 1 - math.exp(-1))
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(expected)
