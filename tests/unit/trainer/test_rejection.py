"""Hand-computed divergences between trainer and engine, and the tokens that they drop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sluice.api.groups.off_policy import Rejection
from sluice_trainer.algorithms.rejection import (
    binary_kl,
    probability_distance,
    reduce_scope,
    rejection_mask,
    token_divergence,
    veto_mask,
)

# Two sequences of 2 and 3 tokens; the second has one masked token, whose ratio is absurd.
MASK = torch.tensor([1, 1, 1, 0, 1])
SEQUENCE = torch.tensor([0, 0, 1, 1, 1])
ROLLOUT = torch.tensor([-1.0, -2.0, -1.5, -90.0, -3.0])
GAP = torch.tensor([0.1, 0.5, -0.2, 80.0, -0.4])
TRAIN = ROLLOUT + GAP
NOWHERE = [0] * 5


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("k1", [0.1, 0.5, -0.2, 20.0, -0.4]),
        ("k2", [0.005, 0.125, 0.02, 200.0, 0.08]),
        ("k3", [math.exp(d) - 1 - d for d in (0.1, 0.5, -0.2, 20.0, -0.4)]),
    ],
    ids=["k1", "k2", "k3"],
)
def test_divergences_by_hand(measure: Any, expected: list[float]) -> None:
    divergences = token_divergence(TRAIN.clone().requires_grad_(), ROLLOUT, measure)
    assert divergences.tolist() == pytest.approx(expected, rel=1e-4)
    assert not divergences.requires_grad


def test_binary_kl_compares_a_token_with_all_others() -> None:
    p, q = 0.8, 0.5
    expected = [
        a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p))
    ]
    first, second = torch.tensor([math.log(p)]), torch.tensor([math.log(q)])
    assert binary_kl(first, second).item() == pytest.approx(expected[0], rel=1e-5)
    assert token_divergence(first, second, "binary_kl").item() == pytest.approx(
        max(expected), rel=1e-5
    )
    assert token_divergence(second, first, "binary_kl").item() == pytest.approx(
        max(expected), rel=1e-5
    )


@pytest.mark.parametrize("sure", [0.0, -200.0])
def test_binary_kl_of_a_certain_token_is_finite(sure: float) -> None:
    divergences = token_divergence(torch.tensor([sure]), torch.tensor([-0.7]), "binary_kl")
    assert 0 < divergences.item() < 20


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("sequence_sum", [0.6, 0.6, -0.6, -0.6, -0.6]),
        ("sequence_mean", [0.3, 0.3, -0.3, -0.3, -0.3]),
        ("sequence_max", [0.5, 0.5, -0.2, -0.2, -0.2]),
    ],
    ids=["sum", "mean", "max"],
)
def test_scopes_ignore_masked_tokens(scope: Any, expected: list[float]) -> None:
    assert reduce_scope(GAP, scope, MASK, SEQUENCE).tolist() == pytest.approx(expected)


def test_the_maximum_of_a_sequence_without_trained_tokens_is_zero() -> None:
    assert reduce_scope(GAP, "sequence_max", torch.zeros(5), SEQUENCE).tolist() == NOWHERE


@pytest.mark.parametrize(
    ("rule", "dropped"),
    [
        (
            {"high": 1.5},
            [0, 1, 0, 1, 0],
        ),  # ratios e^0.1, e^0.5, e^-0.2, -, e^-0.4 against [1 / 1.5, 1.5]
        ({"high": 1.7, "low": 0.7}, [0, 0, 0, 1, 1]),
        (
            {"high": 1.7, "over": "sequence_sum"},
            [1, 1, 1, 1, 1],
        ),  # e^0.6 = 1.82, e^-0.6 = 0.55 < 1 / 1.7 = 0.59
        ({"high": 1.7, "low": 0.5, "over": "sequence_sum"}, [1, 1, 0, 0, 0]),
        ({"high": 1.3, "over": "sequence_mean"}, [1, 1, 1, 1, 1]),
        ({"high": 1.4, "low": 0.8, "over": "sequence_mean"}, [0, 0, 1, 1, 1]),
        ({"measure": "k2", "high": 0.1}, [0, 1, 0, 1, 0]),
        ({"measure": "k2", "over": "sequence_max", "high": 0.1}, [1, 1, 0, 0, 0]),
        (
            {"measure": "k2", "over": "sequence_mean", "high": 0.06},
            [1, 1, 0, 0, 0],
        ),  # 0.065 and 0.05
        ({"measure": "k3", "over": "sequence_sum", "high": 0.1}, [1, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_a_rule_drops_tokens_outside_its_bounds(rule: dict[str, Any], dropped: list[int]) -> None:
    marks = rejection_mask(TRAIN, ROLLOUT, MASK, SEQUENCE, [Rejection.model_validate(rule)])
    assert marks.tolist() == dropped


def test_tokens_that_any_rule_drops_are_dropped() -> None:
    rules = [Rejection(high=1.5), Rejection(high=1.7, low=0.7)]
    assert rejection_mask(TRAIN, ROLLOUT, MASK, SEQUENCE, rules).tolist() == [0, 1, 0, 1, 1]
    assert rejection_mask(TRAIN, ROLLOUT, MASK, SEQUENCE, []).tolist() == NOWHERE


def test_if_trainer_and_engine_agree_no_token_is_dropped() -> None:
    rules = [Rejection(high=1.0), Rejection(measure="k3", over="sequence_max", high=1e-9)]
    assert rejection_mask(ROLLOUT, ROLLOUT, MASK, SEQUENCE, rules).tolist() == NOWHERE


def test_a_token_vetoes_its_sequence_unless_it_is_masked() -> None:
    gap = torch.tensor([0.0, -10.0, 0.0, -90.0, 0.0])
    assert veto_mask(ROLLOUT + gap, ROLLOUT, MASK, SEQUENCE, 1e-4).tolist() == [1, 1, 0, 0, 0]
    assert veto_mask(ROLLOUT + gap, ROLLOUT, MASK, SEQUENCE, 1e-5).tolist() == NOWHERE


def test_distances_of_probabilities_by_hand() -> None:
    new, old = torch.tensor([math.log(0.5)], requires_grad=True), torch.tensor([math.log(0.8)])
    assert probability_distance(new, old, "dppo_tv").item() == pytest.approx(0.3)
    expected = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    assert probability_distance(new, old, "dppo_kl").item() == pytest.approx(expected, rel=1e-5)
    assert not probability_distance(new, old, "dppo_kl").requires_grad
