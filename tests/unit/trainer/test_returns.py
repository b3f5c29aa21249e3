"""Returns and GAE against loops written as the papers write them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sluice_trainer.algorithms.returns import discounted_returns, gae, token_rewards


def rows(*values: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float32) for row in values]


def test_the_reward_comes_at_the_last_unmasked_token() -> None:
    masks = rows([1, 0, 1, 0], [1], [0, 0], [])
    kl = rows([1, 50, 2, 50], [3], [9, 9], [])
    rewards = token_rewards(torch.tensor([10.0, 20.0, 30.0, 40.0]), masks, kl, 0.1)
    assert rewards[0].tolist() == pytest.approx([-0.1, 0, 10 - 0.2, 0])
    assert rewards[1].tolist() == pytest.approx([19.7])
    assert rewards[2].tolist() == [0, 0]
    assert rewards[3].tolist() == []


def test_a_masked_token_may_have_any_kl() -> None:
    rewards = token_rewards(torch.tensor([1.0]), rows([1, 0]), rows([0, float("nan")]), 0.5)
    assert rewards[0].tolist() == [1, 0]


def returns_of(rewards: list[Tensor], gamma: float) -> list[Tensor]:
    """Return the returns of responses without masked tokens."""
    return discounted_returns(rewards, [torch.ones(len(row)) for row in rewards], gamma)


def test_returns_are_discounted_sums_of_later_rewards() -> None:
    returns = returns_of(rows([1, 2, 4], [8]), 0.5)
    assert [row.tolist() for row in returns] == [[1 + 1 + 1, 2 + 2, 4], [8]]


def test_a_masked_token_is_not_discounted() -> None:
    """A tool's words make no answer worth less; the masked tokens themselves have no return."""
    returns = discounted_returns(rows([1, 50, 50, 4]), rows([1, 0, 0, 1]), 0.5)
    assert returns[0].tolist() == [1 + 0.5 * 4, 0, 0, 4]


def test_without_a_discount_returns_are_sums() -> None:
    assert returns_of(rows([1, 2, 4], []), 1.0)[0].tolist() == [7, 6, 4]
    assert returns_of([], 0.9) == []


Rows = st.lists(
    st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4), st.integers(0, 1)), max_size=7),
    min_size=1,
    max_size=5,
)
Factor = st.sampled_from([0.0, 0.5, 0.9, 1.0])


@given(Rows, Factor)
def test_returns_equal_a_loop(batch: list[list[tuple[int, int, int]]], gamma: float) -> None:
    """verl's `compute_reinforce_plus_plus_outcome_advantage`, token by token."""
    rewards = rows(*[[float(r) for r, _, _ in row] for row in batch])
    returns = discounted_returns(
        rewards, rows(*[[float(m) for _, _, m in row] for row in batch]), gamma
    )
    for row, ours in zip(batch, returns, strict=True):
        running = 0.0
        expected: list[float] = []
        for reward, _, mask in reversed(row):
            running = reward + gamma * running if mask else running
            expected.insert(0, running if mask else 0.0)
        assert ours.tolist() == pytest.approx(expected)


def loop(
    row: list[tuple[int, int, int]], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """GAE over one response; what an observation would change is skipped (verl
    `compute_gae_advantage_return`)."""
    following, last = 0.0, 0.0
    advantages: list[float] = []
    for reward, value, mask in reversed(row):
        if mask:
            delta = reward + gamma * following - value
            last = delta + gamma * lam * last
            following = value
        advantages.insert(0, last if mask else 0.0)
    returns = [a + v if m else 0.0 for a, (_, v, m) in zip(advantages, row, strict=True)]
    return advantages, returns


@given(Rows, Factor, Factor)
def test_gae_equals_a_loop_that_skips_masked_tokens(
    batch: list[list[tuple[int, int, int]]], gamma: float, lam: float
) -> None:
    rewards, values, masks = (
        rows(*[[float(token[k]) for token in row] for row in batch]) for k in range(3)
    )
    advantages, returns = gae(rewards, values, masks, gamma=gamma, lam=lam)
    for row, a, r in zip(batch, advantages, returns, strict=True):
        expected_advantages, expected_returns = loop(row, gamma, lam)
        assert a.tolist() == pytest.approx(expected_advantages, abs=1e-9)
        assert r.tolist() == pytest.approx(expected_returns, abs=1e-9)


def test_an_observation_does_not_change_the_actions_around_it() -> None:
    plain = gae(rows([0, 0, 1]), rows([0.5, 0.2, 0.9]), rows([1, 1, 1]), gamma=0.9, lam=0.8)
    observed = gae(
        rows([0, 0, 7, 7, 1]),
        rows([0.5, 0.2, 3, -3, 0.9]),
        rows([1, 1, 0, 0, 1]),
        gamma=0.9,
        lam=0.8,
    )
    for actions, all_tokens in zip(plain, observed, strict=True):
        assert all_tokens[0][[0, 1, 4]].tolist() == pytest.approx(actions[0].tolist())
        assert all_tokens[0][2:4].tolist() == [0, 0]


def test_with_lambda_one_and_zero_values_gae_is_the_return() -> None:
    rewards, masks = rows([1, 2, 4]), rows([1, 1, 1])
    advantages, returns = gae(rewards, rows([0, 0, 0]), masks, gamma=0.5, lam=1.0)
    assert advantages[0].tolist() == returns[0].tolist() == returns_of(rewards, 0.5)[0].tolist()


def test_with_lambda_zero_gae_is_one_step_ahead() -> None:
    advantages, _ = gae(rows([0, 1]), rows([0.3, 0.6]), rows([1, 1]), gamma=1.0, lam=0.0)
    assert advantages[0].tolist() == pytest.approx([0.6 - 0.3, 1 - 0.6])


def test_a_batch_without_responses_has_no_returns() -> None:
    assert gae([], [], [], gamma=1.0, lam=1.0) == ([], [])
