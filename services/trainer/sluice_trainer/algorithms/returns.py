"""Returns of single tokens: discounted later rewards, and generalized advantage estimation.

Responses differ in length and a loop over tokens is slow, so they are padded and processed side by
side, in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def token_rewards(
    rewards: Tensor, masks: Sequence[Tensor], kl: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """Compute the reward of each token: -kl_coef * kl, and the response's reward at its last one.

    Only unmasked tokens have a reward, and the last one is the last *unmasked* token: a response
    that ends in an observation (tool output) is rewarded for what the policy wrote. (slime does so
    for reinforce_plus_plus, but not for ppo.) A response without an unmasked token gets 0.

    Parameters
    ----------
    rewards
        [responses].
    masks, kl
        Each [response].
    kl_coef
        Coefficient of the KL penalty.

    Returns
    -------
    Each [response] float64.

    """
    result = []
    for reward, mask, penalty in zip(rewards.double(), masks, kl, strict=True):
        values = torch.where(mask > 0, -kl_coef * penalty.double(), 0.0)
        (unmasked,) = mask.nonzero(as_tuple=True)
        if len(unmasked):
            values[unmasked[-1]] += reward
        result.append(values)
    return result


def discounted_returns(
    rewards: Sequence[Tensor], masks: Sequence[Tensor], gamma: float
) -> list[Tensor]:
    """Compute G_t = r_t + gamma * G_{t+1} of each response, over actions only.

    REINFORCE++ (Hu 2025; verl `compute_reinforce_plus_plus_outcome_advantage`). t + 1 is the next
    *unmasked* token, as in `gae`: an observation is not an action of the policy. (In slime's
    `get_reinforce_plus_plus_returns` it is.) Masked tokens get 0.

    Parameters
    ----------
    rewards, masks
        Each [response].
    gamma
        Discount.

    Returns
    -------
    Each [response] float64.

    """
    actions = [mask > 0 for mask in masks]
    earned = [reward.double()[mask] for reward, mask in zip(rewards, actions, strict=True)]
    returns = _unpad(_scan(_pad(earned), gamma), earned)
    return [_scatter(values, mask) for values, mask in zip(returns, actions, strict=True)]


def gae(
    rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    gamma: float,
    lam: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute advantages and returns by generalized advantage estimation, over actions only.

    Schulman et al. 2016, eq. 16: delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma *
    lam * A_{t+1};  returns = A + V. t + 1 is the next *unmasked* token, as in verl: an observation
    is not an action of the policy, so it contributes neither a value nor a discount. After the last
    token V and A are 0. Masked tokens get 0.

    Parameters
    ----------
    rewards, values, masks
        Each [response].
    gamma
        Discount.
    lam
        Lambda of the estimator.

    Returns
    -------
    Advantages and returns, each [response] float64.

    """
    actions = [mask > 0 for mask in masks]
    action_values = [value.double()[mask] for value, mask in zip(values, actions, strict=True)]
    earned = [reward.double()[mask] for reward, mask in zip(rewards, actions, strict=True)]
    padded = _pad(action_values)
    # V_{t+1} of each action; 0 after the last one.
    following = torch.cat([padded[:, 1:], padded.new_zeros(len(padded), 1)], dim=1)[
        :, : padded.shape[1]
    ]
    deltas = _pad(earned) + gamma * following - padded
    advantages = _unpad(_scan(deltas, gamma * lam), action_values)
    returns = [a + v for a, v in zip(advantages, action_values, strict=True)]
    return [_scatter(a, m) for a, m in zip(advantages, actions, strict=True)], [
        _scatter(r, m) for r, m in zip(returns, actions, strict=True)
    ]


def _scan(values: Tensor, factor: float) -> Tensor:
    """Compute y_t = x_t + factor * y_{t+1} along the last dimension of [responses, tokens]."""
    # A reversed cumulative sum needs no loop.
    if factor == 1.0:
        return values.flip(-1).cumsum(-1).flip(-1)
    result = values.clone()
    for t in range(values.shape[-1] - 2, -1, -1):
        result[:, t] += factor * result[:, t + 1]
    return result


def _pad(rows: Sequence[Tensor]) -> Tensor:
    """Pad rows of different lengths with 0 at the right, [rows, longest] float64."""
    if not rows:
        return torch.zeros(0, 0, dtype=torch.float64)
    return pad_sequence([row.double() for row in rows], batch_first=True)


def _unpad(padded: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [row[: len(original)] for row, original in zip(padded, like, strict=True)]


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Put the values of unmasked tokens at their positions, with 0 between them."""
    result = values.new_zeros(len(mask))
    result[mask] = values
    return result
