"""Losses of preferences: their papers' formulas, and sums over micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice.api.groups.losses import Loss, LossType
from sluice_trainer.algorithms.objective import LossInputs, Objective
from sluice_trainer.algorithms.preference import (
    preference_objective,
    reward_model_objective,
    with_means_by_label,
)
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.step.batch_statistics import reference_kl

# Two pairs: answers of 2, 1, 1 and 3 tokens, of which the last has one that is not trained.
SEQUENCE = torch.tensor([0, 0, 1, 2, 3, 3, 3])
MASK = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
LOG_PROBS = torch.tensor([-0.5, -1.0, -2.0, -0.3, -1.5, -math.inf, -0.7])
REFERENCE = torch.tensor([-0.7, -1.1, -1.2, -0.9, -1.0, -50.0, -0.8])
ENTROPY = torch.arange(7.0)
# Sums and lengths of the answers, (chosen, rejected) of each pair.
SUMS = [(-1.5, -2.0), (-0.3, -2.2)]
REFERENCE_SUMS = [(-1.8, -1.2), (-0.9, -1.8)]
LENGTHS = [(2, 1), (1, 2)]


def inputs(rows: slice = slice(None)) -> LossInputs:
    sequence = SEQUENCE[rows] - int(SEQUENCE[rows].min())
    zeros = torch.zeros(len(sequence))
    weights = MASK[rows] / MASK.sum()
    return LossInputs(
        zeros,
        weights,
        weights,
        zeros,
        sequence,
        ref_log_probs=REFERENCE[rows],
        sequences=int(sequence.max()) + 1,
        sample_weight=1 / 2,
    )


def objective(
    kind: LossType,
    settings: dict[str, Any] | None = None,
    log_probs: Tensor = LOG_PROBS,
    rows: slice = slice(None),
) -> Objective:
    settings = settings or {}
    loss = Loss.model_validate({"type": kind, "preference": settings})
    return preference_objective(log_probs[rows], ENTROPY[rows], inputs(rows), loss)


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


def differences(*, mean: bool, reference: bool) -> list[float]:
    """Chosen less rejected, of each pair."""
    result = []
    for own, ref, length in zip(SUMS, REFERENCE_SUMS, LENGTHS, strict=True):
        scores = [
            (o - (r if reference else 0)) / (n if mean else 1)
            for o, r, n in zip(own, ref, length, strict=True)
        ]
        result.append(scores[0] - scores[1])
    return result


def log_odds(number: int) -> float:
    chosen, rejected = (s / n for s, n in zip(SUMS[number], LENGTHS[number], strict=True))
    odds = [p / (1 - p) for p in (math.exp(chosen), math.exp(rejected))]
    return math.log(odds[0] / odds[1])


OF_REFERENCE = differences(mean=False, reference=True)
CASES: list[tuple[LossType, dict[str, float], list[float]]] = [
    ("dpo", {}, [-log_sigmoid(0.1 * d) for d in OF_REFERENCE]),
    ("dpo", {"beta": 0.5}, [-log_sigmoid(0.5 * d) for d in OF_REFERENCE]),
    (
        "dpo",
        {"beta": 0.5, "labelSmoothing": 0.2},
        [-0.8 * log_sigmoid(0.5 * d) - 0.2 * log_sigmoid(-0.5 * d) for d in OF_REFERENCE],
    ),
    (
        "dpo",
        {"lengthNormalized": True},
        [-log_sigmoid(0.1 * d) for d in differences(mean=True, reference=True)],
    ),
    ("ipo", {}, [(d - 5) ** 2 for d in differences(mean=True, reference=True)]),
    (
        "ipo",
        {"beta": 0.2, "lengthNormalized": False},
        [(d - 2.5) ** 2 for d in OF_REFERENCE],
    ),
    (
        "simpo",
        {},
        [-log_sigmoid(2 * d - 0.5) for d in differences(mean=True, reference=False)],
    ),
    (
        "simpo",
        {"margin": 1.4, "beta": 2.5},
        [-log_sigmoid(2.5 * d - 1.4) for d in differences(mean=True, reference=False)],
    ),
    (
        "orpo",
        {"beta": 0.3},
        [-SUMS[i][0] / LENGTHS[i][0] - 0.3 * log_sigmoid(log_odds(i)) for i in (0, 1)],
    ),
]


@pytest.mark.parametrize(("kind", "settings", "losses"), CASES, ids=str)
def test_the_loss_is_the_papers_formula(
    kind: LossType, settings: dict[str, float], losses: list[float]
) -> None:
    result = objective(kind, settings)
    assert result.loss.item() == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert result.sums["loss"].item() == pytest.approx(result.loss.item())


@pytest.mark.parametrize(("kind", "settings", "losses"), CASES, ids=str)
def test_micro_batches_of_whole_pairs_add_up(
    kind: LossType, settings: dict[str, float], losses: list[float]
) -> None:
    whole = objective(kind, settings)
    parts = [objective(kind, settings, rows=rows) for rows in (slice(0, 3), slice(3, 7))]
    assert whole.loss.item() == pytest.approx(sum(part.loss.item() for part in parts))
    for name, value in whole.sums.items():
        assert value.item() == pytest.approx(sum(part.sums[name].item() for part in parts))


def test_metrics_have_the_names_and_values_of_trl() -> None:
    sums = {name: value.item() for name, value in objective("dpo", {"beta": 0.5}).sums.items()}
    assert sums.pop("loss") > 0
    assert sums == pytest.approx(
        {
            "rewards/chosen": 0.5 * (0.3 + 0.6) / 2,
            "rewards/rejected": 0.5 * (-0.8 - 0.4) / 2,
            "rewards/margins": 0.5 * (1.1 + 1.0) / 2,
            "rewards/accuracies": 1.0,
            "logps/chosen": (-1.5 - 0.3) / 2,
            "logps/rejected": (-2.0 - 2.2) / 2,
            "entropy_loss": (0 + 1 + 2 + 3 + 4 + 6) / 6,
        },
        rel=1e-5,
    )
    assert objective("orpo").sums["nll_loss"].item() == pytest.approx((0.75 + 0.3) / 2)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo", "orpo"])
def test_the_gradient_raises_the_chosen_answer_and_lowers_the_rejected_one(kind: LossType) -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    objective(kind, log_probs=log_probs).loss.backward()
    assert log_probs.grad is not None
    signs = torch.sign(log_probs.grad).tolist()
    assert signs == [-1, -1, 1, -1, 1, 0, 1]
    assert torch.isfinite(log_probs.grad).all()


def test_an_answer_of_probability_1_has_finite_odds() -> None:
    log_probs = torch.where(SEQUENCE == 0, 0.0, LOG_PROBS).requires_grad_()
    result = objective("orpo", log_probs=log_probs)
    result.loss.backward()
    assert log_probs.grad is not None
    assert torch.isfinite(result.loss)
    assert torch.isfinite(log_probs.grad).all()


def test_a_micro_batch_without_pairs_counts_nothing() -> None:
    empty = torch.zeros(0, requires_grad=True)
    none = LossInputs(
        advantages=torch.zeros(0),
        loss_weights=torch.zeros(0),
        metric_weights=torch.zeros(0),
        rollout_log_probs=torch.zeros(0),
        sequence=torch.zeros(0, dtype=torch.int64),
        ref_log_probs=torch.zeros(0),
    )
    result = preference_objective(empty, torch.zeros(0), none, Loss(type="dpo"))
    result.loss.backward()
    assert not any(value.item() for value in result.sums.values())


# Four answers of kto, of which the first and the last are desirable.
LABELS = (1.0, 0.0, 0.0, 1.0)
RATIOS = [0.3, -0.8, 0.6, -0.4]


def judged(kl: float, **settings: Any) -> Objective:
    advantages = torch.tensor(LABELS)[SEQUENCE]
    loss = Loss.model_validate({"type": "kto", "preference": settings})
    given = replace(inputs(), advantages=advantages, reference_kl=kl, sample_weight=1 / 4)
    return preference_objective(LOG_PROBS, ENTROPY, given, loss)


@pytest.mark.parametrize(
    ("kl", "settings"),
    [(0.0, {}), (0.7, {"beta": 0.5}), (0.2, {"desirableWeight": 2.0, "undesirableWeight": 0.5})],
    ids=str,
)
def test_the_loss_of_kto_is_the_papers_formula(kl: float, settings: dict[str, float]) -> None:
    beta = settings.get("beta", 0.1)
    weights = settings.get("desirableWeight", 1.0), settings.get("undesirableWeight", 1.0)
    losses = [
        weights[0] * (1 - math.exp(log_sigmoid(beta * (ratio - kl))))
        if label
        else weights[1] * (1 - math.exp(log_sigmoid(beta * (kl - ratio))))
        for ratio, label in zip(RATIOS, LABELS, strict=True)
    ]
    result = judged(kl, **settings)
    assert result.loss.item() == pytest.approx(sum(losses) / 4, rel=1e-5)
    assert result.sums["kl"].item() == pytest.approx(kl)


def test_metrics_of_kto_are_means_by_label() -> None:
    sums = {name: value.item() for name, value in judged(0.0, beta=1.0).sums.items()}
    metrics = with_means_by_label(sums)
    assert metrics["desirable_ratio"] == 0.5
    assert metrics["rewards/chosen"] == pytest.approx((0.3 - 0.4) / 2, rel=1e-4)
    assert metrics["rewards/rejected"] == pytest.approx((-0.8 + 0.6) / 2, rel=1e-4)
    assert metrics["rewards/margins"] == pytest.approx(0.05, rel=1e-4)
    assert metrics["logps/rejected"] == pytest.approx((-2.0 - 0.3) / 2, rel=1e-4)
    alone = with_means_by_label(sums | {"desirable_ratio": 1.0})
    assert "rewards/rejected" not in alone
    assert "rewards/margins" not in alone


@pytest.mark.parametrize(
    ("margins", "centering", "expected"),
    [
        pytest.param((0.0, 0.0), 0.0, -log_sigmoid(1.5) - log_sigmoid(-0.5), id="plain"),
        pytest.param((1.0, 0.0), 0.0, -log_sigmoid(0.5) - log_sigmoid(-0.5), id="margin"),
        pytest.param(
            (0.0, 0.0),
            0.1,
            -log_sigmoid(1.5) - log_sigmoid(-0.5) + 0.1 * (0.5**2 + 1.5**2),
            id="centring",
        ),
    ],
)
def test_the_loss_of_a_reward_model_is_that_of_bradley_and_terry(
    margins: tuple[float, float], centering: float, expected: float
) -> None:
    rewards = torch.tensor([1.0, -0.5, 0.5, 1.0], requires_grad=True)
    ones = torch.ones(4)
    given = LossInputs(
        advantages=torch.tensor(margins).repeat_interleave(2),
        loss_weights=ones,
        metric_weights=ones,
        rollout_log_probs=ones,
        sequence=torch.arange(4),
        sequences=4,
        sample_weight=1 / 2,
    )
    loss = Loss.model_validate({"type": "reward_model", "preference": {"centering": centering}})
    result = reward_model_objective(rewards, given, loss.preferences)
    assert result.loss.item() == pytest.approx(expected / 2, rel=1e-5)
    assert result.sums["rewards/accuracies"].item() == 0.5
    assert result.sums["rewards/margins"].item() == pytest.approx(0.5)
    result.loss.backward()
    assert rewards.grad is not None
    assert torch.sign(rewards.grad).tolist() == [-1, 1, -1, 1] or centering


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        pytest.param((-1.0, -3.0), (0.5 + 2.0 - 2.0) / 2, id="above 0"),
        pytest.param((-3.0, -3.0), 0.0, id="below 0"),
    ],
)
def test_the_kl_of_kto_is_the_mean_over_other_answers_of_all_ranks(
    current: tuple[float, float], expected: float
) -> None:
    """Two ranks have one answer each; the second token of the first is not trained."""
    answers = [
        TrainSequence(
            np.zeros(4, np.int32),
            2,
            loss_mask=np.array(mask, np.uint8),
            rollout_log_probs=np.zeros(2, np.float32),
            advantage=0.0,
            ref_log_probs=torch.tensor(reference),
        )
        for mask, reference in (([1, 0], [-1.5, -9.0]), ([1, 1], [-5.0, -1.0]))
    ]
    log_probs = [torch.tensor([current[0], -1.0]), torch.tensor([current[1], -3.0])]
    sent: list[Any] = []

    def gather(value: Any) -> list[Any]:
        sent.append(value)
        return list(sent)

    one, other = (SimpleNamespace(gather=gather, data_parallel_rank=rank) for rank in (0, 1))
    reference_kl(answers[:1], log_probs[:1], one)  # type: ignore[arg-type]
    kl = reference_kl(answers[1:], log_probs[1:], other)  # type: ignore[arg-type]
    assert kl == pytest.approx(expected)
