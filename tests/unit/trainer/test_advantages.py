"""Hand-computed advantages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice_trainer.algorithms.advantages import (
    Moments,
    best_of_group,
    decoupled,
    group_advantages,
    leave_one_out,
    length_weighted,
    mean_scaled,
    moments,
    nonzero_scaled,
    whiten,
)


def advantages(
    rewards: list[float], groups: list[int], *, normalize_std: bool = True
) -> list[float]:
    return group_advantages(
        torch.tensor(rewards), torch.tensor(groups), normalize_std=normalize_std
    ).tolist()


def test_rewards_are_centred_on_their_group() -> None:
    assert advantages([1, 0, 5, 1], [7, 7, 3, 3], normalize_std=False) == [0.5, -0.5, 2, -2]


def test_std_is_unbiased_with_epsilon() -> None:
    # rewards 1, 0: mean 0.5, unbiased variance 0.5
    expected = 0.5 / (0.5**0.5 + 1e-6)
    assert advantages([1, 0], [0, 0]) == pytest.approx([expected, -expected], rel=1e-7)


def test_groups_may_be_interleaved_and_of_any_size() -> None:
    # group 9: 1, 2, 3 (mean 2, std 1); group -1: 0, 4 (mean 2, std sqrt 8)
    wide = 2 / (8**0.5 + 1e-6)
    narrow = 1 / (1 + 1e-6)
    assert advantages([1, 0, 2, 4, 3], [9, -1, 9, -1, 9]) == pytest.approx(
        [-narrow, -wide, 0, wide, narrow]
    )


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_of_one_has_no_advantage(normalize_std: bool) -> None:
    assert advantages([3, 1, 0], [0, 1, 1], normalize_std=normalize_std)[0] == 0


@pytest.mark.parametrize("reward", [0.0, 0.1, -3.3e5])
def test_equal_rewards_have_no_advantage(reward: float) -> None:
    assert advantages([reward] * 7, [0] * 7) == pytest.approx([0.0] * 7, abs=1e-6)


def test_an_empty_batch_is_empty() -> None:
    assert advantages([], []) == []


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) rewards but \(1,\) group ids"):
        advantages([1, 2], [0])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), min_size=1, max_size=30),
    st.randoms(),
)
def test_order_does_not_matter(samples: list[tuple[int, int]], random: object) -> None:
    shuffled = list(enumerate(samples))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    plain = advantages([float(r) for _, r in samples], [g for g, _ in samples])
    mixed = advantages([float(r) for _, (_, r) in shuffled], [g for _, (g, _) in shuffled])
    assert [mixed[[i for i, _ in shuffled].index(k)] for k in range(len(samples))] == pytest.approx(
        plain
    )


def test_whitening_ignores_masked_values() -> None:
    values, mask = torch.tensor([1.0, 3.0, 99.0]), torch.tensor([1, 1, 0])
    white = whiten(values, moments(values, mask))
    # mean 2, unbiased variance 2
    assert white[:2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_moments_of_parts_add_up_to_those_of_the_whole() -> None:
    values, mask = torch.randn(20), (torch.rand(20) > 0.3).int()
    whole = whiten(values, moments(values, mask))
    parts = moments(values[:7], mask[:7]) + moments(values[7:], mask[7:])
    assert torch.allclose(whiten(values, parts), whole)


@pytest.mark.parametrize("values", [[2.0], [0.0, 0.0, 0.0], [7.0, 7.0]], ids=str)
def test_whitening_constant_values_gives_zero(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert whiten(tensor, moments(tensor, torch.ones_like(tensor))).abs().max() < 1e-6


def left_out(rewards: list[float], groups: list[int]) -> list[float]:
    return leave_one_out(torch.tensor(rewards), torch.tensor(groups)).tolist()


def test_leave_one_out_compares_only_with_the_others() -> None:
    assert left_out([1, 0, 5], [3, 3, 3]) == pytest.approx([1 - 2.5, 0 - 3, 5 - 0.5])


def test_leave_one_out_of_a_group_of_one_is_zero() -> None:
    assert left_out([7, 1, 0], [0, 1, 1]) == pytest.approx([0, 1, -1])
    assert left_out([], []) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), min_size=1, max_size=30))
def test_leave_one_out_equals_a_loop(samples: list[tuple[int, int]]) -> None:
    expected = []
    for place, (group, reward) in enumerate(samples):
        others = [r for i, (g, r) in enumerate(samples) if g == group and i != place]
        expected.append(reward - sum(others) / len(others) if others else 0.0)
    assert left_out([float(r) for _, r in samples], [g for g, _ in samples]) == pytest.approx(
        expected, abs=1e-5
    )


def test_whitening_equals_torch_over_the_unmasked_values() -> None:
    values, mask = torch.randn(50), (torch.rand(50) > 0.4).int()
    kept = values[mask > 0]
    expected = (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()
    assert torch.allclose(whiten(values, moments(values, mask))[mask > 0], expected, atol=1e-6)


def test_a_masked_value_may_be_infinite() -> None:
    sums = moments(torch.tensor([1.0, math.inf, 3.0]), torch.tensor([1, 0, 1]))
    assert (float(sums.count), float(sums.total), float(sums.squares)) == (2, 4, 10)


def test_moments_of_nothing_are_zero() -> None:
    nothing = moments(torch.empty(0), torch.empty(0))
    assert (float(nothing.mean), float(nothing.variance)) == (0, 0)
    single = moments(torch.tensor([3.0]), torch.ones(1))
    assert isinstance(single, Moments)
    assert (float(single.mean), float(single.variance)) == (3, 0)


# Group 4: 1, 3, 0; group 8: 2; group 6: 5, 5, 1.
REWARDS, GROUPS = (
    torch.tensor([1.0, 2.0, 5.0, 3.0, 0.0, 5.0, 1.0]),
    torch.tensor([4, 8, 6, 4, 4, 6, 6]),
)


def test_opo_subtracts_the_mean_weighted_by_length() -> None:
    lengths = torch.tensor([2, 9, 1, 1, 5, 3, 0])
    four, six = (2 * 1 + 1 * 3) / 8, 20 / 4
    advantages = length_weighted(REWARDS, GROUPS, lengths)
    assert advantages.tolist() == pytest.approx(
        [1 - four, 0, 5 - six, 3 - four, 0 - four, 5 - six, 1 - six]
    )
    equal = length_weighted(REWARDS, GROUPS, torch.full_like(lengths, 7))
    assert torch.allclose(equal, group_advantages(REWARDS, GROUPS, normalize_std=False), atol=1e-6)
    assert torch.isfinite(length_weighted(REWARDS, GROUPS, torch.zeros_like(lengths))).all()


def test_pass_at_k_rewards_only_a_unique_best_response() -> None:
    assert best_of_group(REWARDS, GROUPS, normalize_std=False).tolist() == [0, 0, 0, 2, 0, 0, 0]
    std = float(torch.tensor([1.0, 3.0, 0.0]).std())
    assert best_of_group(REWARDS, GROUPS, normalize_std=True).tolist() == pytest.approx(
        [0, 0, 0, 2 / std, 0, 0, 0]
    )
    negative = best_of_group(torch.tensor([-3.0, -1.0]), torch.tensor([0, 0]), normalize_std=False)
    assert negative.tolist() == [0, 2]


def test_gpg_has_larger_weights_if_fewer_rewards_are_nonzero() -> None:
    advantages = nonzero_scaled(REWARDS, GROUPS)
    assert torch.allclose(
        advantages, group_advantages(REWARDS, GROUPS, normalize_std=False) * 7 / 6
    )
    assert nonzero_scaled(torch.zeros(4), torch.tensor([0, 0, 1, 1])).tolist() == [0] * 4


def test_an_empty_batch_has_no_advantages() -> None:
    none, no_groups = torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert length_weighted(none, no_groups, no_groups).shape == (0,)
    assert best_of_group(none, no_groups, normalize_std=True).shape == (0,)
    assert nonzero_scaled(none, no_groups).shape == (0,)


def test_max_rl_equals_a_loop() -> None:
    rewards = {3: [1.0, 0.0, 0.0, 0.0], 1: [0.0, 0.0], 8: [1.0], 9: [-2.0, 1.0]}
    values = torch.tensor([r for row in rewards.values() for r in row])
    groups = torch.tensor([group for group, row in rewards.items() for _ in row])
    expected = []
    for row in rewards.values():
        mean = sum(row) / len(row)
        expected += [(r - mean) / mean if mean > 0 and len(row) > 1 else 0.0 for r in row]
    assert mean_scaled(values, groups).tolist() == pytest.approx(expected)
    assert mean_scaled(torch.empty(0), torch.empty(0, dtype=torch.int64)).numel() == 0


def test_the_scale_of_a_part_does_not_matter() -> None:
    """A part in hundreds would drown one of 0 and 1 in grpo's sum."""
    parts = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [0.0, 5.0]])
    groups = torch.zeros(4, dtype=torch.int64)
    plain, scaled = (
        decoupled(parts * torch.tensor([1.0, scale]), [1.0, 0.5], groups, normalize_std=True)
        for scale in (1.0, 100.0)
    )
    assert scaled.tolist() == pytest.approx(plain.tolist(), abs=1e-5)
    columns = [group_advantages(part, groups, normalize_std=True) for part in parts.T]
    assert plain.tolist() == pytest.approx((columns[0] + 0.5 * columns[1]).tolist())
