"""Estimators by hand, on a batch whose groups are split over ranks."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from sluice.api import Algorithm
from sluice.api.groups.estimators import estimators
from sluice_trainer.algorithms.estimators import (
    CustomEstimator,
    EstimatorError,
    Responses,
    estimate,
)

# Group 7: rewards 1, 0, 2; group 3: 4; group 9: 5, 5. This rank trains samples 4 (group 9), 2 and
# 0 (group 7).
REWARDS = torch.tensor([1.0, 0.0, 2.0, 4.0, 5.0, 5.0])
GROUPS = torch.tensor([7, 7, 7, 3, 9, 9])
OWN = torch.tensor([4, 2, 0])
MASKS = [torch.tensor([1]), torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0])]


def responses(**changes: Any) -> Responses:
    kl = [torch.tensor([0.5]), torch.tensor([0.1, 9.0, 0.2, 9.0]), torch.tensor([1.0, 1.0])]
    return Responses(
        **{"rewards": REWARDS, "groups": GROUPS, "own": OWN, "masks": MASKS, "kl": kl, **changes}
    )


def advantages(
    batch: Responses | None = None, custom: CustomEstimator | None = None, **algorithm: Any
) -> list[list[float]]:
    estimates = estimate(batch or responses(), Algorithm.model_validate(algorithm), custom)
    assert all(row.dtype == torch.float32 for row in estimates.advantages)
    return [row.tolist() for row in estimates.advantages]


def approximately(rows: list[list[float]]) -> list[Any]:
    return [pytest.approx(row, abs=1e-6) for row in rows]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_group_estimators_give_all_tokens_of_a_response_the_same_advantage(estimator: str) -> None:
    normalized = 1 / (1 + 1e-6)  # group 7: mean 1, std 1
    assert advantages(estimator=estimator) == approximately([[0], [normalized] * 4, [0, 0]])
    assert advantages(estimator=estimator, normalizeStd=False) == approximately(
        [[0], [1] * 4, [0, 0]]
    )


def test_dr_grpo_never_divides_by_the_std() -> None:
    spread = responses(rewards=REWARDS * 10)
    assert advantages(spread, estimator="dr_grpo") == approximately([[0], [10] * 4, [0, 0]])


def test_rloo_subtracts_the_mean_of_the_other_rewards() -> None:
    assert advantages(estimator="rloo") == approximately([[0], [2 - 0.5] * 4, [0, 0]])


def test_opo_weights_the_mean_of_the_group_by_length() -> None:
    batch = responses(lengths=torch.tensor([1, 3, 4, 5, 2, 2]))
    mean = (1 * 1 + 3 * 0 + 4 * 2) / 8
    assert advantages(batch, estimator="opo") == approximately(
        [[0], [2 - mean] * 4, [1 - mean] * 2]
    )
    with pytest.raises(EstimatorError, match="lengths of all responses"):
        advantages(estimator="opo")


def test_an_optimal_token_baseline_weights_rewards_by_accumulated_energy() -> None:
    """Group 7, rewards 1, 0, 2 with 2, 1, 2 trained tokens; masked ones have no advantage."""
    energies = [[0.5, 0.5], [1.0], [0.25, 0.5], [0.3], [0.1], [0.9]]
    batch = responses(
        energies=[torch.tensor(row) for row in energies],
        masks=[torch.tensor([1]), torch.tensor([1, 0, 1, 0]), torch.tensor([1, 1])],
    )
    first = (0.5 * 1 + 1.0 * 0 + 0.25 * 2) / (0.5 + 1.0 + 0.25)
    second = (1.0 * 1 + 0.75 * 2) / (1.0 + 0.75)
    assert advantages(batch, estimator="optimal_token_baseline") == approximately(
        [[0], [2 - first, 0, 2 - second, 0], [1 - first, 1 - second]]
    )
    with pytest.raises(EstimatorError, match="energies of all responses"):
        advantages(estimator="optimal_token_baseline")


def test_a_token_that_only_one_response_has_gets_no_advantage() -> None:
    batch = responses(
        rewards=torch.tensor([3.0, 1.0]),
        groups=torch.tensor([2, 2]),
        own=torch.tensor([0]),
        masks=[torch.ones(3)],
        kl=[torch.zeros(3)],
        energies=[torch.tensor([0.5, 0.2, 0.1]), torch.tensor([0.5])],
    )
    assert advantages(batch, estimator="optimal_token_baseline") == approximately([[1, 0, 0]])


def test_gpg_scales_with_the_share_of_nonzero_rewards() -> None:
    assert advantages(estimator="gpg") == approximately([[0], [6 / 5] * 4, [0, 0]])


def test_grpo_passk_rewards_only_the_best_response() -> None:
    assert advantages(estimator="grpo_passk", normalizeStd=False) == approximately(
        [[0], [1] * 4, [0, 0]]
    )
    assert advantages(estimator="grpo_passk") == approximately([[0], [1 / (1 + 1e-6)] * 4, [0, 0]])


def test_group_estimators_ignore_the_kl_of_tokens() -> None:
    assert advantages(estimator="rloo", kl={"coef": 0.5}) == advantages(estimator="rloo")
    assert not {
        "grpo",
        "dr_grpo",
        "gspo",
        "cispo",
        "rloo",
        "opo",
        "gpg",
        "grpo_passk",
        "max_rl",
    } & set(estimators(lambda kind: kind.token_kl))


def test_max_rl_divides_by_the_mean_of_the_group() -> None:
    assert advantages(estimator="max_rl") == approximately([[0], [(2 - 1) / 1] * 4, [0, 0]])


def test_gdpo_normalizes_each_part_separately() -> None:
    """In group 7, right is 1, 0, 1 and format 0, 3, 3, which grpo would sum to 1, 3, 4."""
    parts = torch.tensor([[1.0, 0], [0, 3], [1, 3], [5, 5], [1, 0], [1, 0]])
    fields: dict[str, Any] = {
        "estimator": "gdpo",
        "rewardParts": [{"name": "right"}, {"name": "format", "weight": 0.5}],
    }

    def standard(row: list[float], value: float) -> float:
        return (value - statistics.fmean(row)) / (statistics.stdev(row) + 1e-6)

    first = standard([1, 0, 1], 1) + 0.5 * standard([0, 3, 3], 0)
    third = standard([1, 0, 1], 1) + 0.5 * standard([0, 3, 3], 3)
    assert advantages(responses(parts=parts), **fields) == approximately(
        [[0], [third] * 4, [first] * 2]
    )
    with_kl = advantages(responses(parts=parts), kl={"coef": 0.1}, **fields)
    assert with_kl[1][0] == pytest.approx(third - 0.1 * 0.1)
    with pytest.raises(EstimatorError, match="parts of all rewards"):
        advantages(**fields)


def test_reinforce_plus_plus_discounts_rewards_less_kl() -> None:
    estimates = advantages(estimator="reinforce_plus_plus", gamma=0.5, kl={"coef": 1.0})
    second = [-0.1 + 0.5 * 1.8, 0, 1.8, 0]  # the masked token between them is no step
    assert estimates == approximately([[4.5], second, [0, 0]])


def test_reinforce_plus_plus_baseline_subtracts_the_kl_of_each_token() -> None:
    estimates = advantages(estimator="reinforce_plus_plus_baseline", kl={"coef": 1.0})
    assert estimates[0] == pytest.approx([0 - 0.5])
    assert [estimates[1][0], estimates[1][2]] == pytest.approx([1 - 0.1, 1 - 0.2])


def test_remax_subtracts_the_greedy_reward() -> None:
    batch = responses(baselines=torch.tensor([4.0, 0.5, 7.0]))
    assert advantages(batch, estimator="remax")[:2] == approximately(
        [[1], [1.5, -0.5, 1.5, -0.5]]  # masked tokens have no reward to go
    )
    with_kl = advantages(batch, estimator="remax", kl={"coef": 1.0})
    assert [with_kl[1][0], with_kl[1][2]] == pytest.approx([2 - 0.3 - 0.5, 2 - 0.2 - 0.5])


def test_remax_needs_baselines() -> None:
    with pytest.raises(EstimatorError, match="greedy response"):
        advantages(estimator="remax")


def test_ppo_is_gae_over_values() -> None:
    values = [torch.tensor([4.5]), torch.tensor([0.5, -9.0, 1.0, -9.0]), torch.tensor([3.0, 3.0])]
    algorithm = Algorithm.model_validate({"estimator": "ppo", "gamma": 0.9, "lambda": 0.8})
    estimates = estimate(responses(values=values), algorithm)
    last = 2 - 1.0
    first = 0.9 * 1.0 - 0.5 + 0.9 * 0.8 * last
    assert [row.tolist() for row in estimates.advantages] == approximately(
        [[0.5], [first, 0, last, 0], [0, 0]]
    )
    assert estimates.returns is not None
    assert [row.tolist() for row in estimates.returns] == approximately(
        [[5], [first + 0.5, 0, 2, 0], [0, 0]]
    )
    assert all(row.dtype == torch.float32 for row in estimates.returns)


def test_ppo_needs_values() -> None:
    with pytest.raises(EstimatorError, match="critic's values"):
        advantages(estimator="ppo")


CUSTOM = {"estimator": "custom", "function": "mine.py:advantages"}


def test_a_custom_estimator_returns_one_number_or_one_per_token() -> None:
    def mine(batch: Responses, algorithm: Algorithm) -> list[Tensor]:
        best = [batch.rewards[batch.groups == group].max() for group in batch.groups[batch.own]]
        per_token = [torch.arange(len(mask)) * 1.0 for mask in batch.masks]
        return [best[0], per_token[1] * algorithm.gamma, best[2]]

    assert advantages(None, mine, **CUSTOM, gamma=0.5) == [[5], [0, 0.5, 1, 1.5], [2, 2]]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([torch.zeros(())] * 2, "mine.py:advantages gave 2 advantages for 3 responses"),
        (
            [torch.zeros(()), torch.zeros(3), torch.zeros(())],
            r"advantage 1 has shape \(3,\); expected \(\) or \(4,\)",
        ),
        ([torch.zeros(()), torch.tensor(math.nan), torch.zeros(())], "advantage 1 is not finite"),
    ],
    ids=["too few", "wrong length", "not finite"],
)
def test_the_result_of_a_custom_estimator_is_checked(output: list[Tensor], message: str) -> None:
    with pytest.raises(EstimatorError, match=message):
        advantages(None, lambda responses, algorithm: output, **CUSTOM)


def test_a_custom_estimator_may_return_anything_at_masked_tokens() -> None:
    output = [torch.zeros(()), torch.tensor([1.0, math.nan, 2.0, math.inf]), torch.tensor(math.nan)]
    assert advantages(None, lambda responses, algorithm: output, **CUSTOM)[1][0] == 1


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]
)
def test_a_rank_may_have_no_responses(estimator: str) -> None:
    nothing: list[Tensor] = []
    empty = responses(
        own=torch.empty(0, dtype=torch.int64), masks=nothing, kl=nothing, values=nothing
    )
    assert advantages(empty, estimator=estimator) == []


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "remax", "ppo"])
def test_estimates_do_not_depend_on_the_split_over_ranks(estimator: str) -> None:
    masks = [torch.ones(n, dtype=torch.uint8) for n in (1, 2, 3, 4, 1, 2)]
    kl, values = [m * 0.25 for m in masks], [m * 0.5 for m in masks]

    def share(*places: int) -> list[list[float]]:
        part = Responses(
            REWARDS,
            GROUPS,
            torch.tensor(places),
            [masks[p] for p in places],
            [kl[p] for p in places],
            [values[p] for p in places],
            torch.tensor([0.1 * p for p in places]),
        )
        return advantages(part, estimator=estimator, kl={"coef": 0.1})

    assert share(0, 1, 2, 3, 4, 5) == share(0, 1, 2) + share(3) + share(4, 5)
