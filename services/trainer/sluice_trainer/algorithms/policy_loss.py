"""Policy-gradient losses and the corrections of what the present policy did not sample. All per
token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sluice_trainer.algorithms.aggregation import sequence_average, sequence_sum

LOG_RATIO_LIMIT = 20.0
"""Logarithms of ratios are kept within +-20 before exp (verl): of a token that is so far from the
old policy, as of the product over a sequence, it may overflow."""

LEAST_MEAN = 1e-8
"""Weights of a smaller mean are not divided by it (verl)."""


def bounded(log_ratio: Tensor) -> Tensor:
    """The log ratio within +-20: exp of it is finite, and beyond it has no gradient. Any shape."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class PolicyLoss(NamedTuple):
    """loss, clipped: [tokens]. clipped is 1.0 where the clip decided; bounded: where the dual clip
    did.
    """

    loss: Tensor
    clipped: Tensor
    bounded: Tensor | None = None


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), with DAPO's separate upper bound and
    the dual clip.

    max(-r A, -clip(r, 1 - low, 1 + high) A); with `dual` = c and A < 0 at most -c A (Ye et al.
    2020, eq. 5). ratio: pi / pi_old, [tokens]; advantages: [tokens].
    """
    unclipped_loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1 - low, 1 + high) * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    clipped = (clipped_loss > unclipped_loss).float()
    if dual is None:
        return PolicyLoss(loss, clipped)
    bounded = (advantages < 0) & (loss > -dual * advantages)
    loss = torch.where(advantages < 0, torch.minimum(-dual * advantages, loss), loss)
    return PolicyLoss(loss, clipped, bounded.float())


def cispo_loss(
    log_probs: Tensor, ratio: Tensor, advantages: Tensor, *, low: float, high: float
) -> PolicyLoss:
    """-sg(clip(r, 1 - low, 1 + high)) * A * log pi (CISPO, MiniMax-M1 2025, eq. 4).

    The weight is clipped, not the token: every token keeps a gradient, whichever way its ratio
    went. The paper has no lower bound: low = 1. log_probs, with gradient; ratio: pi / pi_old;
    advantages: all [tokens].
    """
    weight = ratio.detach().clamp(1 - low, 1 + high)
    return PolicyLoss(-weight * advantages * log_probs, (weight != ratio.detach()).float())


def reinforce_loss(log_probs: Tensor, advantages: Tensor) -> PolicyLoss:
    """-A log pi, without a ratio (Williams 1992; slime's `reinforce`, verl's `gpg`).
    All [tokens].
    """
    return PolicyLoss(-advantages * log_probs, torch.zeros_like(advantages))


def geo_mean_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    *,
    low: float,
    high: float,
) -> PolicyLoss:
    """-A * exp(mean over the sequence of the clipped log ratios) (GMPO, Zhao et al. 2025, eq. 4;
    verl `geo_mean`).

    Each log ratio is clipped to [-low, high] where that is the pessimistic side of its advantage,
    as in PPO but before the mean, so that one token cannot carry its sequence. All [tokens].
    """
    sign = torch.sign(advantages)
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    ratio = torch.exp(sequence_average(clipped, mask, sequence))
    return PolicyLoss(-ratio * advantages, (clipped != log_ratio).float() * (sign != 0))


def sapo_loss(ratio: Tensor, advantages: Tensor, *, positive: float, negative: float) -> PolicyLoss:
    """-A * sigmoid(t (r - 1)) * 4 / t: a gate in place of the clip (SAPO, Gao et al. 2025, eq. 5
    and 6; verl `sapo`).

    Its gradient is that of the unclipped surrogate at r = 1 and falls off smoothly on both sides:
    sech^2(t (r - 1) / 2) times as large. t: `positive` for A > 0, else `negative`. ratio,
    advantages: [tokens].
    """
    temperature = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return PolicyLoss(-gate * advantages, torch.zeros_like(advantages))


def dppo_loss(
    log_probs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    moved: Tensor,
    *,
    low: float,
    high: float,
    most: float | None,
) -> PolicyLoss:
    """-sg(min(r, most)) * A * log pi, of tokens inside of a trust region (DPPO, Qi et al. 2026;
    verl `dppo_tv`, `_kl`).

    Outside are tokens whose probability has moved further than `high` (A > 0, r > 1) or `low` (A <
    0, r < 1) from the old one; a token that comes back is never held up. moved: how far, by the
    measure of one's choice. All [tokens].
    """
    fixed = ratio.detach()
    outside = ((advantages > 0) & (fixed > 1) & (moved > high)) | (
        (advantages < 0) & (fixed < 1) & (moved > low)
    )
    weight = fixed if most is None else fixed.clamp(max=most)
    return PolicyLoss(torch.where(outside, 0.0, -weight * advantages * log_probs), outside.float())


def clip_cov_loss(
    ratio: Tensor, advantages: Tensor, covariance_mask: Tensor, *, low: float, high: float
) -> PolicyLoss:
    """PPO's clipped surrogate, but 0, and so without gradient, at picked tokens (Clip-Cov, Cui et
    al. 2025).

    covariance_mask: 1.0 at tokens that were drawn from those of large covariance (`covariance`),
    else 0. All [tokens].
    """
    loss, clipped, _ = clipped_surrogate(ratio, advantages, low=low, high=high)
    return PolicyLoss(loss * (1 - covariance_mask), clipped)


def kl_cov_loss(log_ratio: Tensor, advantages: Tensor, covariance_mask: Tensor) -> PolicyLoss:
    """-r A, and at picked tokens + |log pi - log pi_old| (KL-Cov, Cui et al. 2025; verl
    `kl_cov`).

    Nothing is clipped. picked: 1.0 at the tokens of largest covariance (`covariance`), else 0.
    log_ratio: log pi - log pi_old. All [tokens]. The penalty's gradient jumps at log ratio 0, and
    is 0 there.
    """
    loss = -torch.exp(log_ratio) * advantages + covariance_mask * log_ratio.abs()
    return PolicyLoss(loss, torch.zeros_like(loss))


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Logarithm of GSPO's ratio (Zheng et al. 2025, eq. 7): the mean of a sequence's log ratios, at
    each of its tokens.

    slime takes the gradient through this mean, verl through each token's own log-prob; with an
    advantage and a weight that are the same for all tokens of a sequence both are equal. All
    [tokens].
    """
    return sequence_average(log_ratio, mask, sequence)


class Correction(NamedTuple):
    """Importance of each token under the trainer relative to the engine that sampled it. All
    [tokens], detached.

    weight: what the loss is multiplied by; ratio: pi_train / pi_rollout before bounds; bounded: 1.0
    where they differ.
    """

    weight: Tensor
    ratio: Tensor
    bounded: Tensor


def correction_ratio(
    log_ratio: Tensor,
    level: Literal["token", "sequence", "geometric"],
    mask: Tensor,
    sequence: Tensor,
) -> Tensor:
    """pi_train / pi_rollout of each token; or of its sequence (the product over its tokens); or
    their geometric mean.

    verl's `rollout_is: token | sequence` and the geometric mean of its rejection sampling. All
    [tokens], detached.
    """
    log_ratio = log_ratio.detach()
    match level:
        case "token":
            total = log_ratio
        case "sequence":
            total = sequence_sum(log_ratio, mask, sequence)
        case "geometric":
            total = sequence_average(log_ratio, mask, sequence)
    return torch.exp(bounded(total))


def off_policy_correction(
    ratio: Tensor, method: Literal["tis", "icepop"], *, low: float, high: float
) -> Correction:
    """Weights for tokens whose sampling distribution was not quite the trainer's.

    tis: ratio clamped to [low, high] (truncated importance sampling, Yao et al. 2025); icepop: the
    ratio inside [low, high], else 0 (Ling team 2025). ratio: pi_train / pi_rollout, [tokens].
    """
    ratio = ratio.detach()
    match method:
        case "tis":
            weight = ratio.clamp(low, high)
        case "icepop":
            weight = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
        case _:
            raise ValueError(f"unknown off-policy method {method!r}")
    return Correction(weight, ratio, (weight != ratio).float())


def weight_sums(
    weight: Tensor, level: Literal["token", "sequence", "geometric"], mask: Tensor, sequence: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum and count of correction weights, float64, whose quotient over all of a step is their mean
    (`normalized`).

    token: over unmasked tokens. sequence, geometric: over sequences that have an unmasked token,
    all of whose tokens have the same weight. weight, mask, sequence: [tokens]; all tokens of a
    sequence must be in the same call.
    """
    one = (mask > 0).double()
    if level != "token":
        one = one / sequence_sum(one, mask, sequence).clamp(min=1)
    return (weight.double() * one).sum(), one.sum()


def normalized(weight: Tensor, mean: float) -> Tensor:
    """Weights that are 1 on average (verl `rollout_is_batch_normalize`); as they are where all of
    them are 0.
    """
    return weight / mean if mean > LEAST_MEAN else weight


def masked_sequences(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, sequence: Tensor, delta: float
) -> Tensor:
    """Off-policy sequence masking (OPSM, DeepSeek-V3.2; slime `compute_opsm_mask`): 1.0 for tokens
    to leave out.

    Those of negative advantage in a sequence from which the policy has moved away: mean(log pi_old
    - log pi) > delta. log_ratio: log pi - log pi_old; advantages. All [tokens], detached.
    """
    moved = -sequence_average(log_ratio.detach(), mask, sequence)
    return ((advantages < 0) & (moved > delta)).float()
