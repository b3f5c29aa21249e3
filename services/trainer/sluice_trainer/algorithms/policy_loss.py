"""Clipped policy-gradient losses and the correction of the gap between trainer and engine. All per token."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """loss, clipped: [tokens]. clipped is 1.0 where the clipped term was the larger one."""

    loss: Tensor
    clipped: Tensor


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), with DAPO's separate upper bound and the dual clip.

    max(-r A, -clip(r, 1 - low, 1 + high) A); with `dual` = c and A < 0 at most -c A (Ye et al. 2020, eq. 5).
    ratio: pi / pi_old, [tokens]; advantages: [tokens].
    """
    unclipped_loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1 - low, 1 + high) * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(-dual * advantages, loss), loss)
    return PolicyLoss(loss, (clipped_loss > unclipped_loss).float())


class Correction(NamedTuple):
    """Importance of each token under the trainer relative to the engine that sampled it. All [tokens], detached.

    weight: what the loss is multiplied by; ratio: pi_train / pi_rollout before bounds; bounded: 1.0 where they differ.
    """

    weight: Tensor
    ratio: Tensor
    bounded: Tensor


def off_policy_correction(
    log_probs: Tensor, rollout_log_probs: Tensor, method: Literal["tis", "icepop"], *, low: float, high: float
) -> Correction:
    """Weights for tokens whose sampling distribution was not quite the trainer's.

    tis: ratio clamped to [low, high] (truncated importance sampling, Yao et al. 2025); icepop: the ratio inside
    [low, high], else 0 (Ling team 2025). log_probs: the trainer's, of the weights that count as old; [tokens].
    """
    ratio = torch.exp(log_probs.detach() - rollout_log_probs)
    match method:
        case "tis":
            weight = ratio.clamp(low, high)
        case "icepop":
            weight = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
        case _:
            raise ValueError(f"unknown off-policy method {method!r}")
    return Correction(weight, ratio, (weight != ratio).float())
