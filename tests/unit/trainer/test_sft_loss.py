"""Supervised fine-tuning's loss: the likelihood of given answers, in closed form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sluice.api import Algorithm
from sluice.api.groups.losses import Loss
from sluice_trainer.algorithms.aggregation import BatchTotals, token_weights
from sluice_trainer.algorithms.objective import LossInputs
from sluice_trainer.algorithms.sft import sft_objective

SFT = Algorithm(loss=Loss(type="sft"))
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])
SEQUENCE = torch.tensor([0, 0, 0, 1])
TOTALS = BatchTotals(sequences=2, tokens=3)


def inputs(algorithm: Algorithm, rows: slice = slice(None), **more: Any) -> LossInputs:
    weights = token_weights(MASK[rows], SEQUENCE[rows], TOTALS, algorithm.loss_aggregation)
    zeros = torch.zeros(len(weights))
    return LossInputs(zeros, weights, weights, zeros, SEQUENCE[rows], **more)


def test_the_loss_is_the_mean_of_minus_log_pi_over_trained_tokens() -> None:
    log_probs = torch.log(torch.tensor([0.5, 0.01, 0.25, 0.1])).requires_grad_()
    terms = sft_objective(log_probs, torch.zeros(4), inputs(SFT), SFT)
    expected = -math.log(0.5 * 0.25 * 0.1) / 3
    assert terms.loss.item() == pytest.approx(expected)
    assert {name: value.item() for name, value in terms.sums.items()} == pytest.approx(
        {"loss": expected, "nll": expected, "entropy_loss": 0.0}
    )
    assert not terms.maxima, "there is no engine to compare with"
    terms.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1 / 3, 0, -1 / 3, -1 / 3])


def test_the_gradient_of_the_logits_is_the_softmax_less_the_answer() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
    log_probs = torch.log_softmax(logits, -1)[:, 1]
    ones = torch.ones(1)
    weights = token_weights(ones, torch.tensor([0]), BatchTotals(1, 1), "token_mean")
    sft_objective(
        log_probs, ones, LossInputs(ones, weights, weights, ones, torch.tensor([0])), SFT
    ).loss.backward()
    expected = torch.softmax(logits.detach(), -1) - torch.tensor([[0.0, 1.0, 0.0]])
    torch.testing.assert_close(logits.grad, expected)


def test_micro_batches_add_up() -> None:
    log_probs = -torch.rand(4)
    whole = sft_objective(log_probs, torch.ones(4), inputs(SFT), SFT)
    parts = [
        sft_objective(log_probs[r], torch.ones(4)[r], inputs(SFT, r), SFT)
        for r in (slice(0, 3), slice(3, 4))
    ]
    for name, value in whole.sums.items():
        together = sum(part.sums[name].item() for part in parts)
        assert together == pytest.approx(value.item(), abs=1e-6)


def test_a_masked_token_does_not_count_even_if_it_is_impossible() -> None:
    log_probs = torch.tensor([-1.0, -math.inf, -2.0, -3.0], requires_grad=True)
    terms = sft_objective(log_probs, torch.zeros(4), inputs(SFT), SFT)
    assert terms.loss.item() == pytest.approx(2.0)
    terms.loss.backward()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()


def test_slimes_default_gives_all_answers_the_same_weight() -> None:
    algorithm = Algorithm(loss=Loss(type="sft"), aggregation="sequence_mean")
    log_probs = torch.tensor([-1.0, -9.0, -3.0, -5.0])
    terms = sft_objective(log_probs, torch.zeros(4), inputs(algorithm), algorithm)
    assert terms.loss.item() == pytest.approx(((1 + 3) / 2 + 5) / 2)


def test_entropy_and_the_kl_to_the_reference_are_added_as_in_other_losses() -> None:
    algorithm = Algorithm.model_validate(
        {"loss": {"type": "sft"}, "entropyCoef": 0.5, "kl": {"lossCoef": 2.0}}
    )
    log_probs, entropy = torch.tensor([-1.0, -9.0, -2.0, -3.0]), torch.tensor([1.0, 9.0, 2.0, 3.0])
    reference = log_probs - 0.25
    terms = sft_objective(log_probs, entropy, inputs(algorithm, ref_log_probs=reference), algorithm)
    assert terms.sums["kl_loss"].item() == pytest.approx(0.25), "k1: log pi - log pi_ref"
    assert terms.loss.item() == pytest.approx(2.0 - 0.5 * 2.0 + 2.0 * 0.25)
    assert terms.sums["nll"].item() == pytest.approx(2.0), (
        "the perplexity is of the likelihood alone"
    )
