"""The tokens that Clip-Cov and KL-Cov select: those that lower the entropy of the policy most.

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models": a
policy-gradient step lowers the entropy by the covariance of log-probs and advantages, and few
tokens carry most of it. verl selects tokens within a micro-batch. Here they are selected from the
whole optimizer step, so that packing and ranks do not matter. Random choices and ties are decided
by a token's identity: group, sample, position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# [tokens, 3]: group id, index of the sample in the group, position in the sample
# (`token_positions`).
Identity = npt.NDArray[np.int64]
Keys = npt.NDArray[np.float64]


def covariances(
    log_probs: Tensor, advantages: Tensor, mean_log_prob: float, mean_advantage: float
) -> Tensor:
    """Compute (log pi - mean log pi) * (A - mean A) of each token (Cui et al. 2025).

    Parameters
    ----------
    log_probs
        [tokens], under the current policy.
    advantages
        [tokens].
    mean_log_prob, mean_advantage
        Means over the step's unmasked tokens.

    Returns
    -------
    [tokens] float64, detached.

    """
    return (log_probs.detach().double() - mean_log_prob) * (advantages.double() - mean_advantage)


def token_positions(branch: int, length: int) -> npt.NDArray[np.int64]:
    """Return a position in its sample for each token of a sequence, [length].

    Positions of later branches follow those of earlier ones.
    """
    return np.arange(length, dtype=np.int64) + (branch << 32)


def share_of(count: int, ratio: float) -> int:
    """Return how many of `count` tokens are a share `ratio`.

    Rounded down but at least 1 (verl); 0 if there are no tokens or the ratio is 0.
    """
    return min(count, max(int(count * ratio), 1)) if count and ratio > 0 else 0


def random_keys(seed: int, step: int, identity: Identity) -> Keys:
    """Return a pseudo-random number in [0, 1) for each token.

    It is a hash (the finaliser of splitmix64, Steele et al. 2014) of seed, step and identity, so a
    token gets the same number on whatever rank and at whatever position of a row.

    Parameters
    ----------
    seed
        Seed of the run.
    step
        Optimizer step.
    identity
        Identities of the tokens.

    Returns
    -------
    [tokens].

    """
    state = np.zeros(len(identity), np.uint64)
    for part in (np.full(len(identity), seed), np.full(len(identity), step), *identity.T):
        state = _mixed(state ^ part.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def smallest_keys(keys: Keys, identity: Identity, count: int) -> npt.NDArray[np.int64]:
    """Return the indices of the `count` smallest keys, or of all; ties are ordered by identity."""
    order = np.lexsort((identity[:, 2], identity[:, 1], identity[:, 0], keys))
    return order[:count].astype(np.int64)


def clip_cov_candidates(covariance: Tensor, clipped: Tensor, lower: float, upper: float) -> Tensor:
    """Return the tokens that Clip-Cov draws from, [tokens] bool.

    They have lower < covariance < upper and are not clipped by PPO.
    """
    return (covariance > lower) & (covariance < upper) & ~clipped.bool()


def mask_at(indices: npt.NDArray[np.int64], count: int) -> Tensor:
    """Return a mask that is 1.0 at these indices, [count]."""
    mask = torch.zeros(count)
    mask[torch.from_numpy(indices)] = 1.0
    return mask
