"""Rejection of tokens on which trainer and engine disagree: rejection sampling and the veto.

Masked importance sampling (Liu, Li et al. 2025, "When Speed Kills Stability"; slime's `mis.py`,
verl's `rollout_rs`): tokens outside a trust region are dropped instead of weighed down. Dropped
tokens still count in the loss's denominators, so the size of the gradient does not depend on how
many are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sluice.api.groups.off_policy import Divergence, Rejection, Scope
from sluice_trainer.algorithms.aggregation import sequence_average, sequence_sum
from sluice_trainer.algorithms.policy_loss import clamp_log_ratio

# Probabilities are clamped this far from 0 and 1 (verl): in float32 1 - p would be 0 for a certain
# token.
_LEAST_PROBABILITY = 1e-6


def token_divergence(train: Tensor, rollout: Tensor, measure: Divergence) -> Tensor:
    """Compute how far trainer and engine are apart at each token.

    With d = log pi_train - log pi_rollout, clamped to +-20 (verl): k1: d; k2: d^2 / 2; k3: exp(d) -
    1 - d (Schulman 2020; both are 0 if the two agree, and never negative). binary_kl: the larger of
    the two KL divergences between the Bernoulli distributions "this token or another one" (verl's
    KPop).

    Parameters
    ----------
    train, rollout
        [tokens], log-probs under trainer and engine.
    measure
        Which divergence.

    Returns
    -------
    [tokens], detached.

    """
    train, rollout = train.detach(), rollout.detach()
    gap = clamp_log_ratio(train - rollout)
    match measure:
        case "k1":
            return gap
        case "k2":
            return gap.square() / 2
        case "k3":
            return torch.expm1(gap) - gap
        case "binary_kl":
            return torch.maximum(binary_kl(train, rollout), binary_kl(rollout, train))
        case _:
            raise ValueError(f"unknown divergence {measure!r}")


def binary_kl(first: Tensor, second: Tensor) -> Tensor:
    """Compute p log(p/q) + (1-p) log((1-p)/(1-q)) of two log-probs of a token, [tokens]."""
    p, q = (x.exp().clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY) for x in (first, second))
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


def probability_distance(
    log_probs: Tensor, old_log_probs: Tensor, loss: Literal["dppo_tv", "dppo_kl"]
) -> Tensor:
    """Compute how far a token's probability has moved (DPPO's binary approximations).

    dppo_tv: |pi_old - pi|. dppo_kl: KL(pi_old || pi) between "this token or another one".

    Parameters
    ----------
    log_probs, old_log_probs
        [tokens], under the current policy and before the step.
    loss
        Which distance.

    Returns
    -------
    [tokens], detached.

    """
    log_probs, old_log_probs = log_probs.detach(), old_log_probs.detach()
    if loss == "dppo_tv":
        return (log_probs.exp() - old_log_probs.exp()).abs()
    return binary_kl(old_log_probs, log_probs)


def reduce_scope(values: Tensor, scope: Scope, mask: Tensor, sequence: Tensor) -> Tensor:
    """Return each token's value, or the sum, mean or maximum over its sequence. All [tokens]."""
    match scope:
        case "token":
            return values
        case "sequence_sum":
            return sequence_sum(values, mask, sequence)
        case "sequence_mean":
            return sequence_average(values, mask, sequence)
        case "sequence_max":
            return _sequence_max(values, mask, sequence)
        case _:
            raise ValueError(f"unknown scope {scope!r}")


def rejection_mask(
    train: Tensor, rollout: Tensor, mask: Tensor, sequence: Tensor, rules: Sequence[Rejection]
) -> Tensor:
    """Return 1.0 for each token that one of the rules drops, alone or with its sequence.

    k1 keeps low <= exp(value) <= high: the ratio pi_train / pi_rollout of the token, of the
    sequence (sequence_sum), or its geometric mean (sequence_mean). The other measures keep values
    up to high.

    Parameters
    ----------
    train, rollout
        [tokens], log-probs under trainer and engine.
    mask
        [tokens].
    sequence
        [tokens] int, index of each token's sequence.
    rules
        Rules of `offPolicy.reject`.

    Returns
    -------
    [tokens], detached.

    """
    dropped = torch.zeros_like(train, dtype=torch.bool)
    for rule in rules:
        measured = reduce_scope(
            token_divergence(train, rollout, rule.measure), rule.over, mask, sequence
        )
        if rule.measure == "k1":
            ratio = torch.exp(clamp_log_ratio(measured))
            dropped |= (ratio < rule.lower) | (ratio > rule.high)
        else:
            dropped |= measured > rule.high
    return dropped.to(train.dtype)


def veto_mask(
    train: Tensor, rollout: Tensor, mask: Tensor, sequence: Tensor, threshold: float
) -> Tensor:
    """Return 1.0 for all tokens of a sequence with a token whose ratio is below the threshold.

    One token with a tiny pi_train / pi_rollout (1e-4, say) indicates that the policy would not have
    sampled the sequence (slime's `rs_veto_threshold`, verl's `rollout_token_veto_threshold`). All
    [tokens], detached.
    """
    below = (torch.exp((train - rollout).detach()) < threshold).to(train.dtype)
    return (sequence_sum(below, mask, sequence) > 0).to(train.dtype)


def _sequence_max(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Return the largest unmasked value of each token's sequence; 0 if there is none."""
    size = int(sequence.max()) + 1 if sequence.numel() else 0
    # A sequence without an unmasked token stays at -inf, which becomes 0 below.
    least = values.new_full((size,), float("-inf"))
    largest = least.scatter_reduce(
        0, sequence, torch.where(mask > 0, values, float("-inf")), "amax"
    )
    return torch.where(largest.isinf() & (largest < 0), 0.0, largest)[sequence]
