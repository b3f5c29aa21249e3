"""Tokens picked by covariance: which ones, how many, and what the losses do with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sluice.api import Algorithm
from sluice_trainer.algorithms.covariance import (
    clip_cov_candidates,
    covariances,
    mask_at,
    random_keys,
    share_of,
    smallest_keys,
)
from sluice_trainer.algorithms.objective import LossInputs, Objective, policy_objective
from sluice_trainer.algorithms.policy_loss import clip_cov_loss, clipped_surrogate, kl_cov_loss

IDENTITY = np.array(
    [[group, index, place] for group in range(5) for index in range(4) for place in range(30)]
)


def test_covariance_is_the_product_of_what_is_left_after_the_means() -> None:
    log_probs, advantages = torch.tensor([-1.0, -3.0]), torch.tensor([2.0, -1.0])
    products = covariances(log_probs, advantages, -2.0, 0.5)
    assert products.tolist() == pytest.approx([1 * 1.5, -1 * -1.5])


def test_the_mean_of_the_products_is_the_covariance_of_statistics() -> None:
    torch.manual_seed(0)
    log_probs, advantages = torch.randn(50).double(), torch.randn(50).double()
    products = covariances(log_probs, advantages, float(log_probs.mean()), float(advantages.mean()))
    assert float(products.mean()) == pytest.approx(
        float(torch.cov(torch.stack([log_probs, advantages]), correction=0)[0, 1])
    )


@pytest.mark.parametrize(
    ("count", "ratio", "expected"),
    [(0, 0.5, 0), (10, 0.0, 0), (1, 2e-4, 1), (10_000, 2e-4, 2), (7, 0.5, 3), (3, 1.0, 3)],
)
def test_a_share_is_rounded_down_but_never_nothing_of_something(
    count: int, ratio: float, expected: int
) -> None:
    assert share_of(count, ratio) == expected


def test_clip_cov_draws_from_tokens_between_the_bounds_that_ppo_does_not_clip() -> None:
    candidates = clip_cov_candidates(
        torch.tensor([1.0, 1.1, 4.9, 5.0, 2.0]), torch.tensor([0.0, 0, 0, 0, 1]), 1.0, 5.0
    )
    assert candidates.tolist() == [False, True, True, False, False]


def test_a_tokens_lot_is_its_own_wherever_it_lies() -> None:
    drawn = random_keys(7, 3, IDENTITY)
    order = np.random.default_rng(0).permutation(len(IDENTITY))
    assert (random_keys(7, 3, IDENTITY[order]) == drawn[order]).all()
    assert random_keys(7, 3, IDENTITY[:0]).shape == (0,)


def test_lots_are_even_and_fall_anew_with_every_step_and_seed() -> None:
    drawn = np.concatenate([random_keys(1, step, IDENTITY) for step in range(50)])
    assert len(np.unique(drawn)) == len(drawn)
    counts, _ = np.histogram(drawn, bins=10, range=(0, 1))
    assert abs(counts - len(drawn) / 10).max() < 5 * np.sqrt(len(drawn) / 10)
    assert abs(np.corrcoef(random_keys(1, 0, IDENTITY), random_keys(1, 1, IDENTITY))[0, 1]) < 0.15
    assert abs(np.corrcoef(random_keys(1, 0, IDENTITY), random_keys(2, 0, IDENTITY))[0, 1]) < 0.15


def test_the_smallest_keys_and_of_equal_ones_the_first_identity() -> None:
    keys = np.array([2.0, 1.0, 1.0, 0.5])
    identity = np.array([[0, 0, 0], [1, 0, 1], [1, 0, 0], [9, 9, 9]])
    assert smallest_keys(keys, identity, 2).tolist() == [3, 2]
    assert smallest_keys(keys, identity, 9).tolist() == [3, 2, 1, 0]
    assert smallest_keys(keys[:0], identity[:0], 3).tolist() == []
    assert mask_at(smallest_keys(keys, identity, 2), 4).tolist() == [0, 0, 1, 1]


RATIO = torch.tensor([1.5, 0.5, 1.1, 1.5])
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -1.0])
PICKED = torch.tensor([1.0, 0.0, 0.0, 1.0])


def test_clip_cov_is_ppo_but_for_the_picked() -> None:
    loss = clip_cov_loss(RATIO, ADVANTAGES, PICKED, low=0.2, high=0.2)
    assert loss.loss.tolist() == pytest.approx([0.0, 0.8, -2.2, 0.0])
    plain = clipped_surrogate(RATIO, ADVANTAGES, low=0.2, high=0.2)
    nobody = clip_cov_loss(RATIO, ADVANTAGES, torch.zeros(4), low=0.2, high=0.2)
    assert torch.equal(nobody.loss, plain.loss)
    assert torch.equal(loss.clipped, plain.clipped)


def test_kl_cov_holds_the_picked_back_and_clips_nothing() -> None:
    log_ratio = RATIO.log()
    loss = kl_cov_loss(log_ratio, ADVANTAGES, PICKED).loss
    gap = float(log_ratio[0])
    assert loss.tolist() == pytest.approx([-1.5 + gap, 0.5, -2.2, 1.5 + gap])


def test_gradients_are_those_of_the_written_formulas() -> None:
    log_ratio = torch.tensor([0.3, -0.4, 0.0, 0.05], requires_grad=True)
    kl_cov_loss(log_ratio, ADVANTAGES, PICKED).loss.sum().backward()
    ratio = log_ratio.detach().exp()
    expected = -ratio * ADVANTAGES + PICKED * torch.sign(log_ratio.detach())
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx(expected.tolist())
    log_ratio = log_ratio.detach().requires_grad_()
    clip_cov_loss(log_ratio.exp(), ADVANTAGES, PICKED, low=0.2, high=0.2).loss.sum().backward()
    assert log_ratio.grad is not None
    # Token 1 has ratio 0.67 < 0.8 and A < 0: clipped, no gradient.
    assert log_ratio.grad.tolist() == pytest.approx([0.0, 0.0, -2.0, 0.0])


def objective(
    loss: str, covariance_mask: torch.Tensor | None, log_probs: torch.Tensor, **spec: object
) -> Objective:
    inputs = LossInputs(
        advantages=ADVANTAGES,
        loss_weights=torch.full((4,), 0.25),
        metric_weights=torch.full((4,), 0.25),
        rollout_log_probs=torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        sequence=torch.tensor([0, 0, 1, 1]),
        covariance_mask=covariance_mask,
    )
    return policy_objective(
        log_probs,
        torch.zeros(4),
        inputs,
        Algorithm.model_validate({"loss": {"type": loss}, **spec}),
    )


def test_the_objective_leaves_picked_tokens_out_and_counts_them() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -1.0], requires_grad=True)
    result = objective("clip_cov", PICKED, log_probs)
    assert float(result.sums["cov_frac"]) == 0.5
    result.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, 0.25, -0.5, 0.0])


def test_on_policy_kl_cov_is_the_plain_policy_gradient() -> None:
    """Its penalty is 0 there, and so is its gradient: not the sign of what rounding leaves."""
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -1.0], requires_grad=True)
    objective("kl_cov", torch.ones(4), log_probs).loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx((-0.25 * ADVANTAGES).tolist())


def test_kl_covs_penalty_is_the_log_ratio_of_picked_tokens() -> None:
    log_probs = torch.tensor([-0.5, -1.0, -1.0, -1.0])
    options = {"offPolicy": {"oldLogProbs": "rollout"}}
    without = objective("kl_cov", torch.zeros(4), log_probs, **options)
    penalised = objective("kl_cov", PICKED, log_probs, **options)
    assert float(penalised.loss - without.loss) == pytest.approx(0.25 * 0.5)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_without_a_look_at_the_whole_step_there_is_no_loss(loss: str) -> None:
    with pytest.raises(ValueError, match="needs the covariance mask of the step"):
        objective(loss, None, torch.zeros(4))
