"""Policy-gradient losses, and corrections for tokens of another policy. All per token."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sluice_trainer.algorithms.aggregation import sequence_average, sequence_sum

# Log ratios are clamped to +-20 before exp (verl), which may overflow for a token that is far from
# the old policy, or for the product over a sequence.
LOG_RATIO_LIMIT = 20.0

# Weights are not divided by a smaller mean than this (verl).
LEAST_MEAN = 1e-8


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log ratio to +-20, so that its exp is finite; beyond there is no gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class PolicyLoss(NamedTuple):
    """The policy loss of each token, [tokens].

    `clipped` is 1.0 if the clip decided the loss, `dual_clipped` if the dual clip did.
    """

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor | None = None


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> PolicyLoss:
    """Compute PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with optional dual clip.

    max(-r A, -clip(r, 1 - low, 1 + high) A), with DAPO's separate upper bound. With `dual` = c, the
    loss at A < 0 is at most -c A (Ye et al. 2020, eq. 5).

    Parameters
    ----------
    ratio
        [tokens], r = pi / pi_old, with gradient.
    advantages
        [tokens], A.
    low, high
        The ratio is clipped to [1 - low, 1 + high].
    dual
        Bound c of the dual clip.

    """
    unclipped_loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1 - low, 1 + high) * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    # The larger loss is the pessimistic one; the clip decided if it is the clipped one.
    clipped = (clipped_loss > unclipped_loss).float()
    if dual is None:
        return PolicyLoss(loss, clipped)
    dual_clipped = (advantages < 0) & (loss > -dual * advantages)
    loss = torch.where(advantages < 0, torch.minimum(-dual * advantages, loss), loss)
    return PolicyLoss(loss, clipped, dual_clipped.float())


def cispo_loss(
    log_probs: Tensor, ratio: Tensor, advantages: Tensor, *, low: float, high: float
) -> PolicyLoss:
    """Compute -sg(clip(r, 1 - low, 1 + high)) * A * log pi (CISPO, MiniMax-M1 2025, eq. 4).

    The weight is clipped, not the token: every token keeps a gradient, in whichever direction its
    ratio moved. The paper has no lower bound: low = 1.

    Parameters
    ----------
    log_probs
        [tokens], with gradient.
    ratio
        [tokens], r = pi / pi_old.
    advantages
        [tokens], A.
    low, high
        The ratio is clipped to [1 - low, 1 + high].

    """
    weight = ratio.detach().clamp(1 - low, 1 + high)
    return PolicyLoss(-weight * advantages * log_probs, (weight != ratio.detach()).float())


def reinforce_loss(log_probs: Tensor, advantages: Tensor) -> PolicyLoss:
    """Compute -A log pi, without a ratio (Williams 1992; slime's `reinforce`, verl's `gpg`)."""
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
    """Compute -A * exp(mean over the sequence of the clipped log ratios).

    GMPO (Zhao et al. 2025, eq. 4; verl `geo_mean`). Each log ratio is clipped to [-low, high] on
    the pessimistic side of its advantage, as in PPO but before the mean, so that one token cannot
    dominate its sequence.

    Parameters
    ----------
    log_ratio
        [tokens], log pi - log pi_old, with gradient.
    advantages
        [tokens], A.
    mask
        [tokens].
    sequence
        [tokens] int, index of each token's sequence.
    low, high
        The log ratio is clipped to [-low, high].

    """
    # Clip only on the side where the objective would grow: above for A > 0, below for A < 0.
    sign = torch.sign(advantages)
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    ratio = torch.exp(sequence_average(clipped, mask, sequence))
    return PolicyLoss(-ratio * advantages, (clipped != log_ratio).float() * (sign != 0))


def sapo_loss(ratio: Tensor, advantages: Tensor, *, positive: float, negative: float) -> PolicyLoss:
    """Compute -A * sigmoid(t (r - 1)) * 4 / t, a gate instead of a clip.

    SAPO (Gao et al. 2025, eq. 5 and 6; verl `sapo`). The gradient equals that of the unclipped
    surrogate at r = 1 and falls smoothly on both sides, by a factor sech^2(t (r - 1) / 2).

    Parameters
    ----------
    ratio
        [tokens], r = pi / pi_old, with gradient.
    advantages
        [tokens], A.
    positive, negative
        Temperature t for A > 0, and for the others.

    """
    # The factor 4 / t makes the slope of the gate 1 at r = 1.
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
    """Compute -sg(min(r, most)) * A * log pi for tokens inside a trust region, else 0.

    DPPO (Qi et al. 2026; verl `dppo_tv`, `dppo_kl`). A token is outside if its probability has
    moved further than `high` (A > 0, r > 1) or `low` (A < 0, r < 1) from the old one. A token that
    moves back is never held up.

    Parameters
    ----------
    log_probs
        [tokens], with gradient.
    ratio
        [tokens], r = pi / pi_old.
    advantages
        [tokens], A.
    moved
        [tokens], distance from the old policy by the chosen measure.
    low, high
        Bounds of the distance.
    most
        Bound of the ratio; None: no bound.

    """
    detached = ratio.detach()
    # Outside: the update would move the token further away than the bound.
    outside = ((advantages > 0) & (detached > 1) & (moved > high)) | (
        (advantages < 0) & (detached < 1) & (moved > low)
    )
    weight = detached if most is None else detached.clamp(max=most)
    return PolicyLoss(torch.where(outside, 0.0, -weight * advantages * log_probs), outside.float())


def clip_cov_loss(
    ratio: Tensor, advantages: Tensor, covariance_mask: Tensor, *, low: float, high: float
) -> PolicyLoss:
    """Compute PPO's clipped surrogate, with 0 at selected tokens (Clip-Cov, Cui et al. 2025).

    Parameters
    ----------
    ratio
        [tokens], pi / pi_old, with gradient.
    advantages
        [tokens].
    covariance_mask
        [tokens], 1.0 at tokens that were drawn from those with a large covariance.
    low, high
        The ratio is clipped to [1 - low, 1 + high].

    """
    loss, clipped, _ = clipped_surrogate(ratio, advantages, low=low, high=high)
    return PolicyLoss(loss * (1 - covariance_mask), clipped)


def kl_cov_loss(log_ratio: Tensor, advantages: Tensor, covariance_mask: Tensor) -> PolicyLoss:
    """Compute -r A, plus |log pi - log pi_old| at selected tokens (KL-Cov, Cui et al. 2025).

    verl's `kl_cov`. Ratios are not clipped. The gradient of the penalty jumps at log ratio 0, and
    is 0 there.

    Parameters
    ----------
    log_ratio
        [tokens], log pi - log pi_old, with gradient.
    advantages
        [tokens], A.
    covariance_mask
        [tokens], 1.0 at the tokens with the largest covariance.

    """
    loss = -torch.exp(log_ratio) * advantages + covariance_mask * log_ratio.abs()
    return PolicyLoss(loss, torch.zeros_like(loss))


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Return the log of GSPO's ratio at each token: the mean of its sequence's log ratios.

    Zheng et al. 2025, eq. 7. slime takes the gradient through this mean, verl through each token's
    log-prob. If advantage and weight are equal for all tokens of a sequence, both are the same. All
    [tokens].
    """
    return sequence_average(log_ratio, mask, sequence)


class Correction(NamedTuple):
    """The importance of each token under the trainer relative to the engine, [tokens], detached.

    Attributes
    ----------
    weight
        Factor of the loss.
    ratio
        pi_train / pi_rollout before bounds.
    truncated
        1.0 if weight and ratio differ.

    """

    weight: Tensor
    ratio: Tensor
    truncated: Tensor


def correction_ratio(
    log_ratio: Tensor,
    level: Literal["token", "sequence", "geometric"],
    mask: Tensor,
    sequence: Tensor,
) -> Tensor:
    """Compute pi_train / pi_rollout of each token, or of its sequence.

    The ratio of a sequence is the product over its tokens (verl's `rollout_is: sequence`), or with
    `geometric` their geometric mean (as in verl's rejection sampling).

    Parameters
    ----------
    log_ratio
        [tokens], log pi_train - log pi_rollout.
    level
        Ratio of a token, of a sequence, or geometric mean of a sequence.
    mask
        [tokens].
    sequence
        [tokens] int, index of each token's sequence.

    Returns
    -------
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
    return torch.exp(clamp_log_ratio(total))


def off_policy_correction(
    ratio: Tensor, method: Literal["tis", "icepop"], *, low: float, high: float
) -> Correction:
    """Compute weights for tokens whose sampling distribution differs from the trainer's.

    tis: ratio clamped to [low, high] (truncated importance sampling, Yao et al. 2025). icepop: the
    ratio inside [low, high], else 0 (Ling team 2025).

    Parameters
    ----------
    ratio
        [tokens], pi_train / pi_rollout.
    method
        Which correction.
    low, high
        Bounds of the ratio.

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
    """Return the sum and count of correction weights, whose quotient over a step is their mean.

    With level `token` they go over unmasked tokens, otherwise over sequences with an unmasked
    token, all of whose tokens have the same weight.

    Parameters
    ----------
    weight, mask
        [tokens].
    level
        Level of the weights.
    sequence
        [tokens] int, index of each token's sequence. All tokens of a sequence must be in the same
        call.

    Returns
    -------
    Sum and count, float64 scalars.

    """
    count = (mask > 0).double()
    if level != "token":
        count = count / sequence_sum(count, mask, sequence).clamp(min=1)
    return (weight.double() * count).sum(), count.sum()


def normalize_weights(weight: Tensor, mean: float) -> Tensor:
    """Divide weights by their mean (verl `rollout_is_batch_normalize`), unless it is near 0."""
    return weight / mean if mean > LEAST_MEAN else weight


def opsm_mask(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, sequence: Tensor, delta: float
) -> Tensor:
    """Return 1.0 for tokens that off-policy sequence masking leaves out.

    OPSM (DeepSeek-V3.2; slime `compute_opsm_mask`) leaves out tokens of negative advantage in a
    sequence from which the policy has moved away: mean(log pi_old - log pi) > delta.

    Parameters
    ----------
    log_ratio
        [tokens], log pi - log pi_old.
    advantages, mask
        [tokens].
    sequence
        [tokens] int, index of each token's sequence.
    delta
        Threshold.

    Returns
    -------
    [tokens], detached.

    """
    moved = -sequence_average(log_ratio.detach(), mask, sequence)
    return ((advantages < 0) & (moved > delta)).float()
