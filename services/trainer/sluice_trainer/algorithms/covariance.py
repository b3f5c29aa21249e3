"""Which tokens of an optimizer step Clip-Cov and KL-Cov pick: those by which the entropy of the
policy falls.

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models": a
policy-gradient step lowers the entropy by the covariance of log-probs and advantages, and few
tokens carry most of it. verl picks them from the micro-batch that they happen to lie in; here they
are picked from the whole optimizer step, so that packing and ranks do not matter. Where a choice is
by lot, or equal, a token's identity decides: group, sample, place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Identity = npt.NDArray[np.int64]
"""[tokens, 3]: group id, index of the sample in the group, place in the sample (`places`)."""
Keys = npt.NDArray[np.float64]


def covariances(
    log_probs: Tensor, advantages: Tensor, mean_log_prob: float, mean_advantage: float
) -> Tensor:
    """(log pi - mean log pi) * (A - mean A) of each token (Cui et al. 2025, token-wise centred
    cross-product).

    log_probs: of the present policy; advantages: [tokens]. The means are those of the step's
    unmasked tokens. Returns [tokens] float64, detached.
    """
    return (log_probs.detach().double() - mean_log_prob) * (advantages.double() - mean_advantage)


def places(branch: int, length: int) -> npt.NDArray[np.int64]:
    """A place in its sample for each token of a sequence: in its response, behind those of earlier
    branches. [length]
    """
    return np.arange(length, dtype=np.int64) + (branch << 32)


def share(count: int, ratio: float) -> int:
    """How many of `count` tokens are a share `ratio`: rounded down, at least 1 (verl). 0 of none,
    and for ratio 0.
    """
    return min(count, max(int(count * ratio), 1)) if count and ratio > 0 else 0


def lots(seed: int, step: int, identity: Identity) -> Keys:
    """A number in [0, 1) for each token, drawn by (seed, optimizer step) and the token's identity.
    [tokens]

    A hash (the finaliser of splitmix64, Steele et al. 2014) in place of a generator's sequence: the
    same token draws the same lot on whatever rank and at whatever place of a row it lies.
    """
    state = np.zeros(len(identity), np.uint64)
    for part in (np.full(len(identity), seed), np.full(len(identity), step), *identity.T):
        state = _mixed(state ^ part.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):  # modulo 2^64 is what is meant
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def smallest(keys: Keys, identity: Identity, count: int) -> npt.NDArray[np.int64]:
    """Places of the `count` smallest keys, or of all; equal ones in the order of their identities.
    keys: [tokens].
    """
    order = np.lexsort((identity[:, 2], identity[:, 1], identity[:, 0], keys))
    return order[:count].astype(np.int64)


def between(covariance: Tensor, clipped: Tensor, lower: float, upper: float) -> Tensor:
    """Tokens that Clip-Cov draws from: lower < covariance < upper, and PPO's clip does not hold
    them. [tokens] bool.
    """
    return (covariance > lower) & (covariance < upper) & ~clipped.bool()


def as_mask(places: npt.NDArray[np.int64], count: int) -> Tensor:
    """1.0 at these places. [count]"""
    mask = torch.zeros(count)
    mask[torch.from_numpy(places)] = 1.0
    return mask
