"""Which tokens are left out because trainer and engine disagree about them: rejection sampling, and
the veto.

Masked importance sampling (Liu, Li et al. 2025, "When Speed Kills Stability"; slime's `mis.py`,
verl's `rollout_rs`): what lies outside of a trust region is not weighed down but dropped. What is
dropped still counts in the loss's denominators, so that the size of a gradient does not hang on how
much was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sluice.api.groups.off_policy import Divergence, Rejection, Scope
from sluice_trainer.algorithms.aggregation import sequence_average, sequence_sum
from sluice_trainer.algorithms.policy_loss import bounded

_LEAST_PROBABILITY = 1e-6
"""Probabilities are kept this far from 0 and 1 (verl): in float32 1 - p would be 0 for a sure
token."""


def divergence(train: Tensor, rollout: Tensor, measure: Divergence) -> Tensor:
    """How far trainer and engine are apart at each token. train, rollout: log-probs, [tokens].
    Detached.

    With d = log pi_train - log pi_rollout, within +-20 (verl): k1: d; k2: d^2 / 2; k3: exp(d) - 1 -
    d (Schulman 2020; both are 0 where the two agree, and never negative). binary_kl: the larger of
    the two KL divergences between the Bernoulli distributions "this token or another one" (verl's
    KPop).
    """
    train, rollout = train.detach(), rollout.detach()
    gap = bounded(train - rollout)
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
    """KL(p || q) = p log(p/q) + (1-p) log((1-p)/(1-q)) of two log-probabilities of a token.
    [tokens], at least 0.
    """
    p, q = (x.exp().clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY) for x in (first, second))
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


def probability_distance(
    log_probs: Tensor, old: Tensor, loss: Literal["dppo_tv", "dppo_kl"]
) -> Tensor:
    """How far a token's probability has moved (DPPO's binary approximations): |pi_old - pi|, or
    KL(pi_old || pi).

    log_probs: of the present policy; old: before the step. [tokens], detached.
    """
    log_probs, old = log_probs.detach(), old.detach()
    return (log_probs.exp() - old.exp()).abs() if loss == "dppo_tv" else binary_kl(old, log_probs)


def over_scope(values: Tensor, scope: Scope, mask: Tensor, sequence: Tensor) -> Tensor:
    """Each token's value; or the sum, mean or largest of the unmasked tokens of its sequence. All
    [tokens].
    """
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


def rejected(
    train: Tensor, rollout: Tensor, mask: Tensor, sequence: Tensor, rules: Sequence[Rejection]
) -> Tensor:
    """1.0 for each token that any of the rules drops, itself or with its sequence. All [tokens],
    detached.

    k1 is kept where low <= exp(its value) <= high: the ratio pi_train / pi_rollout of the token, of
    the sequence (sequence_sum), or its geometric mean (sequence_mean). The others are kept where
    their value is at most high.
    """
    dropped = torch.zeros_like(train, dtype=torch.bool)
    for rule in rules:
        measured = over_scope(divergence(train, rollout, rule.measure), rule.over, mask, sequence)
        if rule.measure == "k1":
            ratio = torch.exp(bounded(measured))
            dropped |= (ratio < rule.lower) | (ratio > rule.high)
        else:
            dropped |= measured > rule.high
    return dropped.to(train.dtype)


def vetoed(
    train: Tensor, rollout: Tensor, mask: Tensor, sequence: Tensor, threshold: float
) -> Tensor:
    """1.0 for all tokens of a sequence in which a token's pi_train / pi_rollout is below the
    threshold.

    One such token (1e-4, say) is a sign that the sequence was not the policy's (slime's
    `rs_veto_threshold`, verl's `rollout_token_veto_threshold`). All [tokens], detached.
    """
    below = (torch.exp((train - rollout).detach()) < threshold).to(train.dtype)
    return (sequence_sum(below, mask, sequence) > 0).to(train.dtype)


def _sequence_max(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """The largest value among the unmasked tokens of each token's sequence; 0 where it has none."""
    size = int(sequence.max()) + 1 if sequence.numel() else 0
    least = values.new_full((size,), float("-inf"))
    largest = least.scatter_reduce(
        0, sequence, torch.where(mask > 0, values, float("-inf")), "amax"
    )
    return torch.where(largest.isinf() & (largest < 0), 0.0, largest)[sequence]
