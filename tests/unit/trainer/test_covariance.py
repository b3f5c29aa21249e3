"""Selection of tokens by covariance, and the losses that use it."""

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


def test_covariance_is_the_product_of_differences_from_the_means() -> None:
    log_probs, advantages = torch.tensor([-1.0, -3.0]), torch.tensor([2.0, -1.0])
    products = covariances(log_probs, advantages, -2.0, 0.5)
    assert products.tolist() == pytest.approx([1 * 1.5, -1 * -1.5])


def test_the_mean_of_the_products_is_the_statistical_covariance() -> None:
    torch.manual_seed(0)
    log_probs, advantages = torch.randn(50).double(), torch.randn(50).double()
    products = covariances(log_probs, advantages, float(log_probs.mean()), float(advantages.mean()))
    assert float(products.mean()) == pytest.approx(
        float(torch.cov(torch.stack([log_probs, advantages]), correction=0)[0, 1])
    )


@pytest.mark.parametrize(
    ("count", "ratio", "expected"),
    [(0, 0.5, 0), (10, 0.0, 0), (1, 2e-4, 1), (10_000, 2e-4, 2), (7, 0.5, 3), (3, 1.0, 3)],
    ids=["no tokens", "ratio 0", "at least one", "exact", "rounded down", "all"],
)
def test_a_share_is_rounded_down_but_at_least_one(count: int, ratio: float, expected: int) -> None:
    assert share_of(count, ratio) == expected


def test_clip_cov_draws_from_unclipped_tokens_between_the_bounds() -> None:
    candidates = clip_cov_candidates(
        torch.tensor([1.0, 1.1, 4.9, 5.0, 2.0]), torch.tensor([0.0, 0, 0, 0, 1]), 1.0, 5.0
    )
    assert candidates.tolist() == [False, True, True, False, False]


def test_the_random_key_of_a_token_depends_only_on_its_identity() -> None:
    drawn = random_keys(7, 3, IDENTITY)
    order = np.random.default_rng(0).permutation(len(IDENTITY))
    assert (random_keys(7, 3, IDENTITY[order]) == drawn[order]).all()
    assert random_keys(7, 3, IDENTITY[:0]).shape == (0,)


def test_random_keys_are_uniform_and_differ_by_step_and_seed() -> None:
    drawn = np.concatenate([random_keys(1, step, IDENTITY) for step in range(50)])
    assert len(np.unique(drawn)) == len(drawn)
    counts, _ = np.histogram(drawn, bins=10, range=(0, 1))
    assert abs(counts - len(drawn) / 10).max() < 5 * np.sqrt(len(drawn) / 10)
    assert abs(np.corrcoef(random_keys(1, 0, IDENTITY), random_keys(1, 1, IDENTITY))[0, 1]) < 0.15
    assert abs(np.corrcoef(random_keys(1, 0, IDENTITY), random_keys(2, 0, IDENTITY))[0, 1]) < 0.15


def test_ties_of_keys_are_ordered_by_identity() -> None:
    keys = np.array([2.0, 1.0, 1.0, 0.5])
    identity = np.array([[0, 0, 0], [1, 0, 1], [1, 0, 0], [9, 9, 9]])
    assert smallest_keys(keys, identity, 2).tolist() == [3, 2]
    assert smallest_keys(keys, identity, 9).tolist() == [3, 2, 1, 0]
    assert smallest_keys(keys[:0], identity[:0], 3).tolist() == []
    assert mask_at(smallest_keys(keys, identity, 2), 4).tolist() == [0, 0, 1, 1]


RATIO = torch.tensor([1.5, 0.5, 1.1, 1.5])
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -1.0])
SELECTED = torch.tensor([1.0, 0.0, 0.0, 1.0])


def test_clip_cov_is_ppo_except_at_selected_tokens() -> None:
    loss = clip_cov_loss(RATIO, ADVANTAGES, SELECTED, low=0.2, high=0.2)
    assert loss.loss.tolist() == pytest.approx([0.0, 0.8, -2.2, 0.0])
    plain = clipped_surrogate(RATIO, ADVANTAGES, low=0.2, high=0.2)
    nobody = clip_cov_loss(RATIO, ADVANTAGES, torch.zeros(4), low=0.2, high=0.2)
    assert torch.equal(nobody.loss, plain.loss)
    assert torch.equal(loss.clipped, plain.clipped)


def test_kl_cov_penalises_selected_tokens_and_does_not_clip() -> None:
    log_ratio = RATIO.log()
    loss = kl_cov_loss(log_ratio, ADVANTAGES, SELECTED).loss
    gap = float(log_ratio[0])
    assert loss.tolist() == pytest.approx([-1.5 + gap, 0.5, -2.2, 1.5 + gap])


def test_gradients_equal_those_of_the_formulas() -> None:
    log_ratio = torch.tensor([0.3, -0.4, 0.0, 0.05], requires_grad=True)
    kl_cov_loss(log_ratio, ADVANTAGES, SELECTED).loss.sum().backward()
    ratio = log_ratio.detach().exp()
    expected = -ratio * ADVANTAGES + SELECTED * torch.sign(log_ratio.detach())
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx(expected.tolist())
    log_ratio = log_ratio.detach().requires_grad_()
    clip_cov_loss(log_ratio.exp(), ADVANTAGES, SELECTED, low=0.2, high=0.2).loss.sum().backward()
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


def test_the_objective_leaves_out_selected_tokens_and_counts_them() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -1.0], requires_grad=True)
    result = objective("clip_cov", SELECTED, log_probs)
    assert float(result.sums["cov_frac"]) == 0.5
    result.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, 0.25, -0.5, 0.0])


def test_kl_cov_on_policy_is_the_plain_policy_gradient() -> None:
    """The penalty and its gradient are 0, instead of the sign of a rounding error."""
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -1.0], requires_grad=True)
    objective("kl_cov", torch.ones(4), log_probs).loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx((-0.25 * ADVANTAGES).tolist())


def test_the_penalty_of_kl_cov_is_the_log_ratio_of_selected_tokens() -> None:
    log_probs = torch.tensor([-0.5, -1.0, -1.0, -1.0])
    options = {"offPolicy": {"oldLogProbs": "rollout"}}
    without = objective("kl_cov", torch.zeros(4), log_probs, **options)
    penalised = objective("kl_cov", SELECTED, log_probs, **options)
    assert float(penalised.loss - without.loss) == pytest.approx(0.25 * 0.5)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_a_loss_by_covariance_needs_the_mask_of_the_step(loss: str) -> None:
    with pytest.raises(ValueError, match="needs the covariance mask of the step"):
        objective(loss, None, torch.zeros(4))
