"""Divergences over a whole vocabulary equal the formulas, and autograd through them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from sluice.api import Algorithm
from sluice.api.groups.distillation import WholeVocabulary
from sluice_trainer.algorithms.distillation import divergence_gradient, divergence_shares
from sluice_trainer.algorithms.objective import Divergence, LossInputs, Objective, policy_objective

KINDS: tuple[WholeVocabulary, ...] = get_args(WholeVocabulary)
HALF, SURE = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


def jsd(q: Tensor, p: Tensor, beta: float) -> Tensor:
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


WRITTEN: dict[WholeVocabulary, Callable[[Tensor, Tensor, float], Tensor]] = {
    "reverse_kl": lambda q, p, beta: kl(q, p),
    "forward_kl": lambda q, p, beta: kl(p, q),
    "jsd": jsd,
}


def test_divergences_of_two_words_by_hand() -> None:
    """Student 0.5, 0.5; teacher 0.9, 0.1."""
    reverse = divergence_shares(HALF, SURE, "reverse_kl", 0.5)
    assert float(reverse.divergence) == pytest.approx(
        0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    )
    forward = divergence_shares(HALF, SURE, "forward_kl", 0.5)
    assert float(forward.divergence) == pytest.approx(
        0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    )
    assert float(forward.reverse_kl) == pytest.approx(float(reverse.divergence))
    both = divergence_shares(HALF, SURE, "jsd", 0.25)
    first, second = 0.25 * 0.9 + 0.75 * 0.5, 0.25 * 0.1 + 0.75 * 0.5
    expected = 0.25 * (0.9 * math.log(0.9 / first) + 0.1 * math.log(0.1 / second))
    expected += 0.75 * (0.5 * math.log(0.5 / first) + 0.5 * math.log(0.5 / second))
    assert float(both.divergence) == pytest.approx(expected)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_equal_those_of_the_formula(kind: WholeVocabulary, beta: float) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(7, 11, dtype=torch.float64)).requires_grad_()
    teacher = (3 * torch.randn(7, 11, dtype=torch.float64)).log_softmax(-1)
    written = WRITTEN[kind](logits.softmax(-1), teacher.exp(), beta)
    (expected,) = torch.autograd.grad(written.sum(), logits)
    student = logits.detach().log_softmax(-1)
    shares = divergence_shares(student, teacher, kind, beta)
    assert torch.allclose(shares.divergence, written, atol=1e-12)
    assert torch.allclose(
        divergence_gradient(student, teacher, shares.score, kind, beta), expected, atol=1e-12
    )
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_split_vocabularies_add_up(kind: WholeVocabulary) -> None:
    torch.manual_seed(1)
    student, teacher = (torch.randn(3, 10, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    whole = divergence_shares(student, teacher, kind, 0.3)
    parts = [
        divergence_shares(student[:, at], teacher[:, at], kind, 0.3)
        for at in (slice(0, 4), slice(4, 10))
    ]
    for name, value in whole._asdict().items():
        assert torch.allclose(getattr(parts[0], name) + getattr(parts[1], name), value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_agrees_has_no_divergence_and_no_gradient(kind: WholeVocabulary) -> None:
    student = torch.randn(4, 6, dtype=torch.float64).log_softmax(-1)
    shares = divergence_shares(student, student, kind, 0.4)
    assert shares.divergence.abs().max() < 1e-12
    assert divergence_gradient(student, student, shares.score, kind, 0.4).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_impossible_words_give_finite_numbers(
    kind: WholeVocabulary,
) -> None:
    student = torch.tensor([[0.0, -300.0, -300.0], [-300.0, 0.0, 300.0]]).log_softmax(-1)
    teacher = torch.tensor([[-300.0, 0.0, -300.0], [-300.0, 0.0, 300.0]]).log_softmax(-1)
    shares = divergence_shares(student, teacher, kind, 0.5)
    assert all(torch.isfinite(values).all() for values in shares)
    assert torch.isfinite(divergence_gradient(student, teacher, shares.score, kind, 0.5)).all()


def test_jsd_is_bounded_and_approaches_kl_at_its_ends() -> None:
    torch.manual_seed(2)
    student, teacher = (torch.randn(50, 9, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    half = divergence_shares(student, teacher, "jsd", 0.5).divergence
    assert ((half >= 0) & (half <= math.log(2))).all()
    small = 1e-7
    near_forward = divergence_shares(student, teacher, "jsd", small).divergence / small
    assert torch.allclose(
        near_forward, divergence_shares(student, teacher, "forward_kl", 0).divergence, rtol=1e-3
    )
    near_reverse = divergence_shares(student, teacher, "jsd", 1 - small).divergence / small
    assert torch.allclose(
        near_reverse, divergence_shares(student, teacher, "reverse_kl", 0).divergence, rtol=1e-3
    )


def objective(weights: Tensor, of_words: Tensor, **distillation: object) -> Objective:
    size = len(weights)
    inputs = LossInputs(
        advantages=torch.tensor([1.0, -1.0])[:size],
        loss_weights=weights,
        metric_weights=weights,
        rollout_log_probs=torch.zeros(size),
        sequence=torch.zeros(size, dtype=torch.int64),
    )
    teacher = {"path": "t"}
    algorithm = Algorithm.model_validate({"distillation": {"teacher": teacher, **distillation}})
    divergence = Divergence(of_words, 2 * of_words.detach())
    return policy_objective(
        torch.zeros(size), torch.zeros(size), inputs, algorithm, None, divergence
    )


def test_the_divergence_is_added_to_the_policy_loss() -> None:
    of_words = torch.tensor([0.4, 0.8], requires_grad=True)
    result = objective(torch.tensor([0.5, 0.25]), of_words, divergence="forward_kl", coef=3.0)
    assert float(result.sums["opd_loss"]) == pytest.approx(0.5 * 0.4 + 0.25 * 0.8)
    assert float(result.sums["opd_reverse_kl"]) == pytest.approx(2 * (0.5 * 0.4 + 0.25 * 0.8))
    assert float(result.loss.detach()) == pytest.approx(-0.5 + 0.25 + 3 * 0.4)
    result.loss.backward()
    assert of_words.grad is not None
    assert of_words.grad.tolist() == pytest.approx([1.5, 0.75])


def test_a_masked_token_adds_no_divergence() -> None:
    result = objective(
        torch.tensor([1.0, 0.0]), torch.tensor([0.4, float("nan")]), divergence="jsd"
    )
    assert float(result.sums["opd_loss"]) == pytest.approx(0.4)


def test_the_divergence_of_no_tokens_is_zero() -> None:
    assert float(objective(torch.empty(0), torch.empty(0), divergence="jsd").loss) == 0
