"""Estimators: from rewards to the advantage of each token, one function per estimator.

A rank knows the rewards of the whole batch, because a group's responses may be on several ranks,
and the tokens of its share. The estimate of a response does not depend on its rank. Only whitening
needs the tokens of all ranks; it follows afterwards, with sums over ranks (`advantages.Moments`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.api import Algorithm
from sluice_trainer.algorithms.advantages import (
    best_of_group,
    decoupled,
    group_advantages,
    leave_one_out,
    length_weighted,
    mean_scaled,
    nonzero_scaled,
    token_baselines,
)
from sluice_trainer.algorithms.returns import discounted_returns, gae, token_rewards


class EstimatorError(ValueError):
    """An estimator cannot work with its input. The message is for people."""


@dataclass(frozen=True, slots=True)
class Responses:
    """The input of an estimator. Failed responses are left out.

    Attributes
    ----------
    rewards
        [samples] float32, of the whole batch.
    groups
        [samples] int, group of each sample of the whole batch.
    own
        [sequences] int, index into `rewards` of each sequence that this rank trains; all branches
        of a response have the same index.
    masks
        Each [response], 1 at trained tokens of this rank's sequences.
    kl
        Each [response], KL from the reference; 0 if `kl.coef` is 0.
    values
        Each [response], values of the critic; only for ppo.
    baselines
        [sequences], reward of the greedy response to each sequence's prompt; only for remax.
    lengths
        [samples] int, trained tokens of each sample of the whole batch.
    parts
        [samples, parts] float32, `algorithm.rewardParts` of the whole batch; only for gdpo.
    energies
        Each [trained tokens], of the whole batch's samples; only for optimal_token_baseline.
    own_tokens
        Each [response] int, index into `rewards` of each token; only with turn advantages.

    """

    rewards: Tensor
    groups: Tensor
    own: Tensor
    masks: Sequence[Tensor]
    kl: Sequence[Tensor]
    values: Sequence[Tensor] | None = None
    baselines: Tensor | None = None
    lengths: Tensor | None = None
    parts: Tensor | None = None
    energies: Sequence[Tensor] | None = None
    own_tokens: Sequence[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimates for this rank's sequences, each [response].

    `returns` are the critic's targets; only for ppo.
    """

    advantages: list[Tensor]
    returns: list[Tensor] | None = None


Estimator = Callable[[Responses, Algorithm], Estimate]
# `algorithm.function`: one advantage for each sequence of this rank, a scalar or [response].
CustomEstimator = Callable[[Responses, Algorithm], Sequence[Tensor]]


def estimate(
    responses: Responses, algorithm: Algorithm, custom: CustomEstimator | None = None
) -> Estimate:
    """Estimate the advantages of this rank's sequences, each [response] float32, not whitened.

    Parameters
    ----------
    responses
        Rewards of the batch, and tokens of this rank.
    algorithm
        Settings.
    custom
        Function of `algorithm.function`, for `estimator: custom`.

    Raises
    ------
    EstimatorError
        An input is missing, or the custom function returned something invalid.

    """
    if algorithm.estimator != "custom":
        return _ESTIMATORS[algorithm.estimator](responses, algorithm)
    if custom is None:
        raise EstimatorError("estimator: custom needs algorithm.function")
    return _checked(custom(responses, algorithm), responses, str(algorithm.function))


def _grpo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Reward minus the group's mean, divided by (std(group) + 1e-6): grpo, gspo, cispo."""
    advantages = group_advantages(
        responses.rewards, responses.groups, normalize_std=algorithm.normalize_std
    )
    return _per_token(advantages, responses)


def _dr_grpo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Reward minus the group's mean.

    Without the std, a prompt's difficulty does not change its weight (Liu et al. 2025).
    """
    advantages = group_advantages(responses.rewards, responses.groups, normalize_std=False)
    return _per_token(advantages, responses)


def _rloo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Reward minus the mean of the other rewards of the group."""
    return _per_token(leave_one_out(responses.rewards, responses.groups), responses)


def _opo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Reward minus the group's mean weighted by length."""
    if responses.lengths is None:
        raise EstimatorError("opo needs the lengths of all responses")
    advantages = length_weighted(responses.rewards, responses.groups, responses.lengths)
    return _per_token(advantages, responses)


def _grpo_passk(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Lead of the best response of a group over the second best; 0 for the others."""
    leads = best_of_group(
        responses.rewards, responses.groups, normalize_std=algorithm.normalize_std
    )
    return _per_token(leads, responses)


def _gpg(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Reward minus the group's mean, scaled by samples / nonzero rewards of the batch."""
    return _per_token(nonzero_scaled(responses.rewards, responses.groups), responses)


def _max_rl(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Reward minus the group's mean, divided by that mean."""
    return _per_token(mean_scaled(responses.rewards, responses.groups), responses)


def _optimal_token_baseline(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Reward minus the group's baseline at each trained token."""
    if responses.energies is None:
        raise EstimatorError("optimal_token_baseline needs the energies of all responses")
    baselines = token_baselines(responses.rewards, responses.groups, responses.energies)
    rows, trained_before = [], Counter[int]()
    for sample, mask in zip(responses.own.tolist(), responses.masks, strict=True):
        # The tokens of a sample's branches follow one another.
        trained, start = mask > 0, trained_before[sample]
        trained_before[sample] += int(trained.sum())
        baseline = baselines[int(responses.groups[sample])][start : trained_before[sample]]
        row = torch.zeros(len(mask))
        row[trained] = (responses.rewards[sample].double() - baseline).float()
        rows.append(row)
    return Estimate(rows)


def _gdpo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Sum of the parts' group advantages, minus kl_coef * kl; whitened afterwards."""
    if responses.parts is None:
        raise EstimatorError("gdpo needs the parts of all rewards")
    weights = [part.weight for part in algorithm.reward_parts]
    sums = decoupled(
        responses.parts, weights, responses.groups, normalize_std=algorithm.normalize_std
    )
    return _minus_kl(_per_token(sums, responses), responses, algorithm)


def _reinforce_plus_plus(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Discounted returns of the reward minus kl_coef * kl (Hu 2025).

    The batch is the baseline: advantages are whitened afterwards.
    """
    rewards = _token_rewards(responses, algorithm)
    return Estimate(_floats(discounted_returns(rewards, responses.masks, algorithm.gamma)))


def _reinforce_plus_plus_baseline(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Reward minus the group's mean, minus kl_coef * kl; whitened afterwards.

    As in slime; verl subtracts the sum of the KL from the reward.
    """
    return _minus_kl(_dr_grpo(responses, algorithm), responses, algorithm)


def _remax(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Reward to go minus the reward of the greedy response to the prompt.

    Li et al. 2023; verl `remax`.
    """
    if responses.baselines is None:
        raise EstimatorError("remax needs the reward of each prompt's greedy response")
    to_go = discounted_returns(_token_rewards(responses, algorithm), responses.masks, 1.0)
    return Estimate(
        _floats([g - b for g, b in zip(to_go, responses.baselines.double(), strict=True)])
    )


def _ppo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """GAE over the reward minus kl_coef * kl, with the critic's values."""
    if responses.values is None:
        raise EstimatorError("ppo needs the critic's values")
    rewards = _token_rewards(responses, algorithm)
    advantages, returns = gae(
        rewards, responses.values, responses.masks, gamma=algorithm.gamma, lam=algorithm.lambda_
    )
    return Estimate(_floats(advantages), _floats(returns))


_ESTIMATORS: dict[str, Estimator] = {
    "grpo": _grpo,
    "gspo": _grpo,
    "cispo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "opo": _opo,
    "gpg": _gpg,
    "grpo_passk": _grpo_passk,
    "max_rl": _max_rl,
    "optimal_token_baseline": _optimal_token_baseline,
    "gdpo": _gdpo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "ppo": _ppo,
}


def _token_rewards(responses: Responses, algorithm: Algorithm) -> list[Tensor]:
    return token_rewards(
        responses.rewards[responses.own], responses.masks, responses.kl, algorithm.kl.coef
    )


def _minus_kl(estimate: Estimate, responses: Responses, algorithm: Algorithm) -> Estimate:
    pairs = zip(estimate.advantages, responses.kl, strict=True)
    return Estimate([a - algorithm.kl.coef * kl for a, kl in pairs])


def _per_token(advantages: Tensor, responses: Responses) -> Estimate:
    """Repeat an advantage, [samples], at every token of its response, or of its turn."""
    if responses.own_tokens is not None:
        return Estimate([advantages[indices] for indices in responses.own_tokens])
    own = advantages[responses.own]
    return Estimate([a.expand(len(mask)) for a, mask in zip(own, responses.masks, strict=True)])


def _floats(rows: Sequence[Tensor]) -> list[Tensor]:
    return [row.float() for row in rows]


def _checked(answer: Sequence[Tensor], responses: Responses, name: str) -> Estimate:
    """Check the result of a user's function.

    It must have one tensor per response, a scalar or [response], finite at trained tokens.
    """
    if len(answer) != len(responses.masks):
        raise EstimatorError(
            f"{name} gave {len(answer)} advantages for {len(responses.masks)} responses"
        )
    advantages = []
    for number, (value, mask) in enumerate(zip(answer, responses.masks, strict=True)):
        advantage = torch.as_tensor(value, dtype=torch.float32)
        if advantage.shape not in ((), mask.shape):
            shape = tuple(advantage.shape)
            raise EstimatorError(
                f"{name}: advantage {number} has shape {shape}; expected () or ({len(mask)},)"
            )
        advantages.append(advantage.expand(len(mask)))
        if not bool(torch.isfinite(advantages[-1][mask > 0]).all()):
            raise EstimatorError(f"{name}: advantage {number} is not finite")
    return Estimate(advantages)
