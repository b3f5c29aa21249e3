"""Advantages of whole responses relative to the others of their prompt, and whitening.

These functions use only rewards and group ids, so they run on a whole batch wherever its metadata
is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Added to a group's standard deviation (slime).
STD_EPS = 1e-6
# Added to the variance of a whitened batch (slime, verl).
WHITEN_EPS = 1e-8


def group_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """Compute group-relative advantages (GRPO, Shao et al. 2024, eq. 4).

    (r - mean(group)) / (unbiased std(group) + 1e-6), as slime. A group of one gets 0.

    Parameters
    ----------
    rewards
        [samples] float.
    groups
        [samples] int, group id of each sample, in any order, groups of any size.
    normalize_std
        Divide by the standard deviation.

    Returns
    -------
    [samples].

    """
    if rewards.shape != groups.shape:
        raise ValueError(f"{tuple(rewards.shape)} rewards but {tuple(groups.shape)} group ids")
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    member, count = _membership(groups)
    # In double precision, because the rounding error of a mean of equal rewards, divided by a std
    # near 0, would be an advantage.
    centred = _centred(rewards, member, count)
    if normalize_std:
        centred = centred / (_group_std(centred, member, count)[member] + STD_EPS)
    return centred.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """Compute a reward minus the mean of the *other* rewards of its group.

    RLOO (Ahmadian et al. 2024, eq. 9; verl `rloo`): r - mean(others) = (r - mean(group)) * n / (n -
    1). A group of one gets 0, because it has no baseline (verl gives it its reward).

    Parameters
    ----------
    rewards
        [samples] float.
    groups
        [samples] int, group id of each sample, in any order, groups of any size.

    Returns
    -------
    [samples].

    """
    centred = group_advantages(rewards, groups, normalize_std=False)
    if centred.numel() == 0:
        return centred
    member, count = _membership(groups)
    return centred * (count / (count - 1).clamp(min=1))[member].to(centred.dtype)


def length_weighted(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Compute a reward minus its group's mean weighted by length, sum(l * r) / sum(l).

    OPO (Hao et al. 2025; verl `opo`): the baseline of least variance if a response's gradient grows
    with its length. A group of one gets 0 (verl gives it its reward).

    Parameters
    ----------
    rewards
        [samples] float.
    groups
        [samples] int, group id of each sample, in any order, groups of any size.
    lengths
        [samples] int, trained tokens.

    Returns
    -------
    [samples].

    """
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    member, count = _membership(groups)
    weights = lengths.double()
    total = _group_sum(weights, member, count).clamp(min=1)
    baseline = _group_sum(weights * rewards, member, count) / total
    return torch.where(count[member] > 1, rewards.double() - baseline[member], 0.0).float()


def token_baselines(
    rewards: Tensor, groups: Tensor, energies: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Compute the optimal baseline of each group at each trained token.

    The baseline at token t is sum(W_t * r) / sum(W_t) over the responses that have a t-th trained
    token, and W_t is the energy of a response's trained tokens up to t: rewards count more if more
    gradient has accumulated (arXiv:2602.07078; verl `optimal_token_baseline`). A token that only
    one response of the group has gets its reward as baseline, so its advantage is 0.

    Parameters
    ----------
    rewards
        [samples] float.
    groups
        [samples] int, group id of each sample.
    energies
        Energies of each sample, [trained tokens].

    Returns
    -------
    Group id -> [tokens] float64.

    """
    baselines = {}
    for group in set(groups.tolist()):
        (members,) = (groups == group).nonzero(as_tuple=True)
        weights = pad_sequence([energies[i].double().cumsum(0) for i in members.tolist()])
        baselines[group] = (weights @ rewards[members].double()) / weights.sum(1).clamp(min=1e-8)
    return baselines


def best_of_group(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """Give the best response of a group its lead over the second best, and the others 0.

    Tang et al. 2025; verl `grpo_passk`. The lead is what the best response adds to the largest of k
    rewards, so the group is rewarded for its best attempt. Two equal best responses have no lead. A
    group of one gets 0.

    Parameters
    ----------
    rewards
        [samples] float.
    groups
        [samples] int, group id of each sample, in any order, groups of any size.
    normalize_std
        Divide by (unbiased std(group) + 1e-6).

    Returns
    -------
    [samples].

    """
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    member, count = _membership(groups)
    least = rewards.new_full((len(count),), float("-inf"))
    best = least.scatter_reduce(0, member, rewards, "amax")[member]
    leads = rewards == best
    # Two equal best responses have no lead over each other.
    alone = _group_sum(leads.double(), member, count)[member] == 1
    # The second best: the best of those that are not the best.
    second = least.scatter_reduce(0, member, torch.where(leads, float("-inf"), rewards), "amax")[
        member
    ]
    lead = torch.where(leads & alone & (count[member] > 1), rewards - second, 0.0)
    if not normalize_std:
        return lead
    deviation = _group_std(_centred(rewards, member, count), member, count)
    return lead / (deviation[member] + STD_EPS).float()


def nonzero_scaled(rewards: Tensor, groups: Tensor) -> Tensor:
    """Compute (r - mean(group)) * samples / nonzero rewards, counted over the whole batch.

    GPG (Chu et al. 2025; verl `gpg`). Responses without a reward teach little, so the fewer the
    others are, the larger their weight. A group of one gets 0 (verl gives it its reward).

    Parameters
    ----------
    rewards
        [samples] float.
    groups
        [samples] int, group id of each sample, in any order, groups of any size.

    Returns
    -------
    [samples].

    """
    rewarded = int(torch.count_nonzero(rewards))
    return group_advantages(rewards, groups, normalize_std=False) * (
        rewards.numel() / max(rewarded, 1)
    )


def mean_scaled(rewards: Tensor, groups: Tensor) -> Tensor:
    """Compute (r - mean(group)) / mean(group) (MaxRL, arXiv:2602.02710; prime-rl `max_rl`).

    For rewards 1 and 0, its gradient is that of the maximum likelihood, truncated at the order of
    the group's size: a prompt that is solved with probability p has weight 1 / p. A group of one
    gets 0, and so does a group whose mean is at most 0.

    Parameters
    ----------
    rewards
        [samples] float.
    groups
        [samples] int, group id of each sample, in any order, groups of any size.

    Returns
    -------
    [samples].

    """
    centred = group_advantages(rewards, groups, normalize_std=False)
    if centred.numel() == 0:
        return centred
    member, count = _membership(groups)
    mean = (_group_sum(rewards.double(), member, count) / count)[member]
    return torch.where(mean > 0, centred.double() / mean.clamp(min=1e-30), 0.0).float()


def decoupled(
    parts: Tensor, weights: Sequence[float], groups: Tensor, *, normalize_std: bool
) -> Tensor:
    """Sum the group advantages of the parts of a reward, each normalized separately.

    GDPO (arXiv:2601.05242; verl `gdpo`, TRL `normalize_then_sum`), to be whitened afterwards. No
    part dominates by its scale, and different mixtures with the same sum differ.

    Parameters
    ----------
    parts
        [samples, parts].
    weights
        Weight of each part.
    groups
        [samples] int, group id of each sample.
    normalize_std
        Divide by the standard deviation of each group.

    Returns
    -------
    [samples].

    """
    columns = [group_advantages(part, groups, normalize_std=normalize_std) for part in parts.T]
    weighted = [weight * column for weight, column in zip(weights, columns, strict=True)]
    return torch.stack(weighted).sum(0)


def _membership(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's group numbered from 0, [samples], and the group sizes, [groups]."""
    _, member, count = torch.unique(groups, return_inverse=True, return_counts=True)
    return member, count


def _centred(rewards: Tensor, member: Tensor, count: Tensor) -> Tensor:
    """Return rewards minus the mean of their group; 0 in a group of one. [samples] float64."""
    values = rewards.double()
    return torch.where(
        count[member] > 1, values - (_group_sum(values, member, count) / count)[member], 0.0
    )


def _group_std(centred: Tensor, member: Tensor, count: Tensor) -> Tensor:
    """Return the unbiased std of centred rewards; 0 for a group of one. [groups] float64."""
    return (_group_sum(centred.square(), member, count) / (count - 1).clamp(min=1)).sqrt()


def _group_sum(values: Tensor, member: Tensor, count: Tensor) -> Tensor:
    return values.new_zeros(len(count)).index_add_(0, member, values)


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of squares of unmasked values.

    Moments of several ranks add up.
    """

    count: Tensor
    total: Tensor
    squares: Tensor

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    @property
    def mean(self) -> Tensor:
        """The mean; 0 if there are no values."""
        return self.total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """The unbiased variance; 0 for fewer than two values."""
        # E[x^2] - E[x]^2, which rounding may make negative.
        spread = (self.squares / self.count.clamp(min=1) - self.mean * self.mean).clamp(min=0)
        return spread * self.count / (self.count - 1).clamp(min=1)


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Compute moments of the unmasked values in double precision.

    Parameters
    ----------
    values
        Any shape; masked values may be infinite or nan.
    mask
        The same shape; values with mask > 0 count.

    """
    kept = torch.where(mask > 0, values.double(), 0.0)
    return Moments((mask > 0).double().sum(), kept.sum(), (kept * kept).sum())


def whiten(values: Tensor, batch: Moments) -> Tensor:
    """Shift and scale values to mean 0 and variance 1 over the whole batch.

    slime's `distributed_masked_whiten`. The variance is unbiased. A batch of fewer than two values,
    or of equal ones, becomes 0.

    Parameters
    ----------
    values
        Values of this rank, any shape.
    batch
        Moments of all values of the optimizer step, over all ranks.

    """
    if batch.count < 2:
        return torch.zeros_like(values)
    return ((values - batch.mean) * torch.rsqrt(batch.variance + WHITEN_EPS)).to(values.dtype)
