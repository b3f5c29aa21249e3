"""Returns of single tokens: rewards that come later, discounted; and what a critic makes of them.

Responses differ in length and a loop over tokens is slow, so they are padded and walked through
side by side, in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def token_rewards(
    rewards: Tensor, masks: Sequence[Tensor], kl: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """The reward of each token: -kl_coef * kl where unmasked, and the response's reward at its last
    *unmasked* token.

    The last unmasked token, and not the last one: a response that ends in an observation (tool
    output) is rewarded for what the policy wrote (slime does so for reinforce_plus_plus, but not
    for ppo). rewards: [responses]; masks, kl: each [response]. Returns each [response] float64. A
    response without an unmasked token gets 0 everywhere.
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
    """G_t = r_t + gamma * G_{t+1} of each response (REINFORCE++, Hu 2025; verl
    `compute_reinforce_plus_plus_outcome_advantage`), over actions alone.

    t + 1 is the next *unmasked* token, as in `gae`: an observation is no step of the policy. (In
    slime's `get_reinforce_plus_plus_returns` it is one.) Masked tokens get 0. rewards, masks: each
    [response]. Returns each [response] float64.
    """
    chosen = [mask > 0 for mask in masks]
    earned = [reward.double()[mask] for reward, mask in zip(rewards, chosen, strict=True)]
    returns = _unpad(_scan(_pad(earned), gamma), earned)
    return [_spread(values, mask) for values, mask in zip(returns, chosen, strict=True)]


def gae(
    rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    gamma: float,
    lam: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Advantages and returns by generalized advantage estimation (Schulman et al. 2016, eq. 16),
    over actions alone.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1};  returns = A + V.
    t + 1 is the next *unmasked* token, as in verl: an observation is no action of the policy, so
    neither its value nor a discount for it comes in. After the last one V and A are 0. Masked
    tokens get 0. rewards, values, masks: each [response]. Returns advantages and returns, each
    [response] float64.
    """
    chosen = [mask > 0 for mask in masks]
    actions = [value.double()[mask] for value, mask in zip(values, chosen, strict=True)]
    earned = [reward.double()[mask] for reward, mask in zip(rewards, chosen, strict=True)]
    padded = _pad(actions)
    following = torch.cat([padded[:, 1:], padded.new_zeros(len(padded), 1)], dim=1)[
        :, : padded.shape[1]
    ]
    advantages = _unpad(_scan(_pad(earned) + gamma * following - padded, gamma * lam), actions)
    returns = [a + v for a, v in zip(advantages, actions, strict=True)]
    return [_spread(a, m) for a, m in zip(advantages, chosen, strict=True)], [
        _spread(r, m) for r, m in zip(returns, chosen, strict=True)
    ]


def _scan(values: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor * y_{t+1} along the last dimension. values: [responses, tokens]."""
    if factor == 1.0:
        return values.flip(-1).cumsum(-1).flip(-1)
    result = values.clone()
    for t in range(values.shape[-1] - 2, -1, -1):
        result[:, t] += factor * result[:, t + 1]
    return result


def _pad(rows: Sequence[Tensor]) -> Tensor:
    """Rows of different lengths as one [rows, longest] float64, filled up with 0 at the right."""
    if not rows:
        return torch.zeros(0, 0, dtype=torch.float64)
    return pad_sequence([row.double() for row in rows], batch_first=True)


def _unpad(padded: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [row[: len(original)] for row, original in zip(padded, like, strict=True)]


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """Values of the unmasked tokens at their places; 0 between them."""
    result = values.new_zeros(len(mask))
    result[mask] = values
    return result
