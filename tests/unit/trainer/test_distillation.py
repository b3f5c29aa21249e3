"""A teacher's part in advantages, worked out by hand; and that it is the gradient of the reverse
KL."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sluice.api import Algorithm
from sluice_trainer.algorithms.distillation import distilled_advantages, reverse_kl
from sluice_trainer.algorithms.objective import LossInputs, Objective, policy_objective

TEACHER = {"path": "t"}
STUDENT = torch.tensor([-1.0, -2.0, -0.5])
TAUGHT = torch.tensor([-0.5, -3.0, math.nan])
# The third token is masked, and the teacher's log-prob of it is undefined.
WEIGHTS = torch.tensor([0.5, 0.5, 0.0])


def objective(
    log_probs: Tensor = STUDENT,
    *,
    advantages: Tensor | None = None,
    teacher: Tensor | None = TAUGHT,
    old: Tensor | None = None,
    weights: Tensor = WEIGHTS,
    **algorithm: object,
) -> Objective:
    inputs = LossInputs(
        advantages=torch.zeros_like(log_probs) if advantages is None else advantages,
        loss_weights=weights,
        metric_weights=weights,
        rollout_log_probs=torch.full_like(log_probs, -1.0),
        sequence=torch.zeros(len(log_probs), dtype=torch.int64),
        old_log_probs=old,
        teacher_log_probs=teacher,
    )
    spec = {"distillation": {"teacher": TEACHER}} | algorithm
    return policy_objective(
        log_probs, torch.zeros_like(log_probs), inputs, Algorithm.model_validate(spec)
    )


def test_the_reverse_kl_of_a_token_is_the_difference_of_its_log_probs() -> None:
    divergence = reverse_kl(STUDENT, TAUGHT, torch.tensor([True, True, False]))
    assert divergence.tolist() == [-0.5, 1.0, 0.0]


def test_the_divergence_times_its_coefficient_is_subtracted_from_the_advantage() -> None:
    net = distilled_advantages(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([-0.5, 1.0, 0.0]), 2.0)
    assert net.tolist() == [2.0, -1.0, 2.0]


def test_without_a_reward_the_loss_is_the_reverse_kl() -> None:
    sums = objective().sums
    assert float(sums["opd_reverse_kl"]) == pytest.approx(0.5 * -0.5 + 0.5 * 1.0)
    assert float(sums["pg_loss"]) == pytest.approx(0.25)
    assert float(sums["loss"]) == pytest.approx(0.25)


def test_the_teacher_adds_to_the_advantage_of_the_reward() -> None:
    distillation = {"coef": 0.1, "teacher": TEACHER}
    sums = objective(advantages=torch.tensor([1.0, -1.0, 5.0]), distillation=distillation).sums
    assert float(sums["pg_loss"]) == pytest.approx(-0.5 * (1 + 0.05) - 0.5 * (-1 - 0.1), abs=1e-6)


def test_the_divergence_uses_the_weights_at_the_start_of_the_batch() -> None:
    """Ratios e^0.5 (clipped to 1.2, A = 1 > 0) and e^-0.5 (clipped to 0.8, A = -1.5 < 0)."""
    sums = objective(old=torch.tensor([-1.5, -1.5, 0.0])).sums
    assert float(sums["opd_reverse_kl"]) == pytest.approx(0.5 * -1.0 + 0.5 * 1.5)
    assert float(sums["pg_loss"]) == pytest.approx(-0.5 * 1.2 * 1.0 + 0.5 * 0.8 * 1.5)


def test_the_divergence_uses_the_engine_if_the_ratio_does() -> None:
    sums = objective(offPolicy={"oldLogProbs": "rollout"}).sums
    assert float(sums["opd_reverse_kl"]) == pytest.approx(0.5 * -0.5 + 0.5 * 2.0)


def test_opsm_uses_advantages_that_include_the_teacher() -> None:
    """OPSM leaves out sequences of negative advantage that have drifted: here it is the teacher's
    that is negative."""
    options = {"offPolicy": {"opsmDelta": 0.0, "oldLogProbs": "rollout"}}
    assert float(objective(teacher=torch.full((3,), -9.0), **options).sums["opsm_clipfrac"]) == 1  # type: ignore[arg-type]
    assert float(objective(teacher=torch.full((3,), 9.0), **options).sums["opsm_clipfrac"]) == 0  # type: ignore[arg-type]


def test_a_masked_token_has_no_gradient_from_the_teacher() -> None:
    log_probs = STUDENT.clone().requires_grad_()
    objective(log_probs).loss.backward()
    assert log_probs.grad is not None
    # on policy the gradient of a token is -weight * A
    assert log_probs.grad.tolist() == pytest.approx([-0.25, 0.5, 0.0])


def test_the_gradient_is_that_of_the_kl_from_student_to_teacher() -> None:
    """Over all words, each weighted by its probability: the expectation that sampling estimates."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad(
        (log_probs.exp() * (log_probs - teacher)).sum(), logits, retain_graph=True
    )
    objective(log_probs, teacher=teacher, weights=log_probs.detach().exp()).loss.backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad, expected, atol=1e-12)
    assert expected.abs().max() > 0.01


def test_a_teacher_that_agrees_adds_no_gradient() -> None:
    log_probs = STUDENT.clone().requires_grad_()
    result = objective(log_probs, teacher=STUDENT)
    result.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.abs().max() == 0
    assert result.sums["opd_reverse_kl"] == 0


def test_distillation_needs_the_log_probs_of_the_teacher() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.distillation needs the teacher's log-probs"):
        objective(teacher=None)
