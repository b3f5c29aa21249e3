"""From rewards to the advantage of each token: one function for each `algorithm.estimator`.

A rank knows the rewards of the whole batch, for a group's responses may lie on several ranks, and
the tokens of its own responses. What an estimator gives for a response does not depend on which
rank has it; only whitening looks at the tokens of all ranks, and its sums are added up between the
two (`advantages.Moments`).
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
    """An estimator cannot work with what it got. The message is for people."""


@dataclass(frozen=True, slots=True)
class Responses:
    """The input of an estimator. Failed responses are left out.

    rewards [samples] float32, groups, lengths (trained tokens) [samples] int: of the whole batch,
    equal on all ranks. own [own] int: places in them of the sequences that this rank trains, the
    same for all branches of a response. own_tokens: the places of each of their tokens, where turns
    have places of their own, each [response] int. masks, kl: of those, each [response]; kl is 0
    where `kl.coef` is. values: of those, each [response], from the critic; baselines [own]: reward
    of the greedy response to the prompt.
    parts [samples, parts] float32: of `algorithm.rewardParts`, of the whole batch. energies: of the
    trained tokens of the whole batch's samples, each [trained tokens].
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
    """Of this rank's responses: advantages, each [response]; returns, each [response]: what the
    critic learns.
    """

    advantages: list[Tensor]
    returns: list[Tensor] | None = None


Estimator = Callable[[Responses, Algorithm], Estimate]
Custom = Callable[[Responses, Algorithm], Sequence[Tensor]]
"""`algorithm.function`: one advantage for each own sequence, a scalar or one for each of its
tokens."""


def estimate(responses: Responses, algorithm: Algorithm, custom: Custom | None = None) -> Estimate:
    """Advantages of this rank's responses, each [response] float32, not whitened yet."""
    if algorithm.estimator != "custom":
        return _ESTIMATORS[algorithm.estimator](responses, algorithm)
    if custom is None:
        raise EstimatorError("estimator: custom needs algorithm.function")
    return _checked(custom(responses, algorithm), responses, str(algorithm.function))


def _grpo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """At every token (r - mean(group)) / (std(group) + 1e-6): grpo, gspo, cispo."""
    advantages = group_advantages(
        responses.rewards, responses.groups, normalize_std=algorithm.normalize_std
    )
    return _everywhere(advantages, responses)


def _dr_grpo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """At every token r - mean(group) (Liu et al. 2025: a prompt's difficulty must not weigh it)."""
    advantages = group_advantages(responses.rewards, responses.groups, normalize_std=False)
    return _everywhere(advantages, responses)


def _rloo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """At every token r - mean(the others of the group)."""
    return _everywhere(leave_one_out(responses.rewards, responses.groups), responses)


def _opo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """At every token r - the group's mean by length."""
    if responses.lengths is None:
        raise EstimatorError("opo needs the lengths of all responses")
    advantages = length_weighted(responses.rewards, responses.groups, responses.lengths)
    return _everywhere(advantages, responses)


def _grpo_passk(responses: Responses, algorithm: Algorithm) -> Estimate:
    """At every token of the group's best response its lead over the second; 0 elsewhere."""
    leads = best_of_group(
        responses.rewards, responses.groups, normalize_std=algorithm.normalize_std
    )
    return _everywhere(leads, responses)


def _gpg(responses: Responses, algorithm: Algorithm) -> Estimate:
    """At every token r - mean(group), times samples / rewards that are not 0."""
    return _everywhere(nonzero_scaled(responses.rewards, responses.groups), responses)


def _max_rl(responses: Responses, algorithm: Algorithm) -> Estimate:
    """At every token (r - mean(group)) / mean(group)."""
    return _everywhere(mean_scaled(responses.rewards, responses.groups), responses)


def _optimal_token_baseline(responses: Responses, algorithm: Algorithm) -> Estimate:
    """At every trained token r - the group's baseline there. Those of a tree's branches follow one
    another.
    """
    if responses.energies is None:
        raise EstimatorError("optimal_token_baseline needs the energies of all responses")
    baselines = token_baselines(responses.rewards, responses.groups, responses.energies)
    rows, before = [], Counter[int]()
    for place, mask in zip(responses.own.tolist(), responses.masks, strict=True):
        trained, start = mask > 0, before[place]
        before[place] += int(trained.sum())
        baseline = baselines[int(responses.groups[place])][start : before[place]]
        row = torch.zeros(len(mask))
        row[trained] = (responses.rewards[place].double() - baseline).float()
        rows.append(row)
    return Estimate(rows)


def _gdpo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """At every token the sum of the parts' group advantages - kl_coef * kl. Whitened afterwards."""
    if responses.parts is None:
        raise EstimatorError("gdpo needs the parts of all rewards")
    weights = [part.weight for part in algorithm.reward_parts]
    sums = decoupled(
        responses.parts, weights, responses.groups, normalize_std=algorithm.normalize_std
    )
    return _less_kl(_everywhere(sums, responses), responses, algorithm)


def _reinforce_plus_plus(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Discounted returns of r - kl_coef * kl (Hu 2025). The batch is the baseline: they are
    whitened afterwards.
    """
    rewards = _token_rewards(responses, algorithm)
    return Estimate(_floats(discounted_returns(rewards, responses.masks, algorithm.gamma)))


def _reinforce_plus_plus_baseline(responses: Responses, algorithm: Algorithm) -> Estimate:
    """At every token r - mean(group) - kl_coef * kl (slime; verl takes the KL's sum off r).
    Whitened afterwards.
    """
    return _less_kl(_dr_grpo(responses, algorithm), responses, algorithm)


def _remax(responses: Responses, algorithm: Algorithm) -> Estimate:
    """Rewards to go minus the reward of the greedy response to the same prompt (Li et al. 2023;
    verl `remax`).
    """
    if responses.baselines is None:
        raise EstimatorError("remax needs the reward of each prompt's greedy response")
    to_go = discounted_returns(_token_rewards(responses, algorithm), responses.masks, 1.0)
    return Estimate(
        _floats([g - b for g, b in zip(to_go, responses.baselines.double(), strict=True)])
    )


def _ppo(responses: Responses, algorithm: Algorithm) -> Estimate:
    """GAE over r - kl_coef * kl and the critic's values."""
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


def _less_kl(estimate: Estimate, responses: Responses, algorithm: Algorithm) -> Estimate:
    pairs = zip(estimate.advantages, responses.kl, strict=True)
    return Estimate([a - algorithm.kl.coef * kl for a, kl in pairs])


def _everywhere(advantages: Tensor, responses: Responses) -> Estimate:
    """The same advantage at every token of a response, or of a turn. advantages: [samples]."""
    if responses.own_tokens is not None:
        return Estimate([advantages[places] for places in responses.own_tokens])
    own = advantages[responses.own]
    return Estimate([a.expand(len(mask)) for a, mask in zip(own, responses.masks, strict=True)])


def _floats(rows: Sequence[Tensor]) -> list[Tensor]:
    return [row.float() for row in rows]


def _checked(answer: Sequence[Tensor], responses: Responses, name: str) -> Estimate:
    """The answer of a user's function, checked: one tensor for each response, a scalar or
    [response], finite where it counts.
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
