"""Advantages of whole responses: how much better one was than the others to the same prompt; and
whitening.

These functions look only at rewards and group ids, so they run on a whole batch wherever its
metadata are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

STD_EPS = 1e-6
"""Added to a group's standard deviation (slime)."""
WHITEN_EPS = 1e-8
"""Added to the variance of a whitened batch (slime, verl)."""


def group_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """Group-relative advantages (GRPO, Shao et al. 2024, eq. 4; slime's unbiased std with eps
    1e-6).

    rewards: [samples] float; groups: [samples] int, any order, any group size. Returns [samples].
    A group of one gets 0.
    """
    if rewards.shape != groups.shape:
        raise ValueError(f"{tuple(rewards.shape)} rewards but {tuple(groups.shape)} group ids")
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    member, count = _membership(groups)
    # In double precision: the rounding of a mean of equal rewards, divided by a std near 0, would
    # be an advantage.
    centred = _centred(rewards, member, count)
    if normalize_std:
        centred = centred / (_group_std(centred, member, count)[member] + STD_EPS)
    return centred.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """A reward minus the mean of the *other* rewards of its group (RLOO, Ahmadian et al. 2024, eq.
    9; verl `rloo`).

    r - mean(others) = (r - mean(group)) * n / (n - 1). rewards: [samples] float; groups: [samples]
    int, any order, any group size. Returns [samples]. A group of one gets 0: nothing is known about
    its prompt (verl gives it its reward).
    """
    centred = group_advantages(rewards, groups, normalize_std=False)
    if centred.numel() == 0:
        return centred
    member, count = _membership(groups)
    return centred * (count / (count - 1).clamp(min=1))[member].to(centred.dtype)


def length_weighted(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """A reward minus its group's mean by length, sum(l * r) / sum(l) (OPO, Hao et al. 2025; verl
    `opo`).

    The baseline of least variance where a response's gradient grows with its length. rewards:
    [samples] float; groups, lengths (trained tokens): [samples] int. Returns [samples]. A group of
    one gets 0 (verl gives it its reward).
    """
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    member, count = _membership(groups)
    long = lengths.double()
    baseline = _group_sum(long * rewards, member, count) / _group_sum(long, member, count).clamp(
        min=1
    )
    return torch.where(count[member] > 1, rewards.double() - baseline[member], 0.0).float()


def token_baselines(
    rewards: Tensor, groups: Tensor, energies: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Group -> its baseline at each trained token, sum(W_t * r) / sum(W_t) over those that have a
    t-th one (optimal token baseline, arXiv:2602.07078; verl `optimal_token_baseline`).

    W_t is the energy of a response's trained tokens up to t: where much gradient has been gathered,
    the reward counts more. rewards: [samples] float; groups: [samples] int; energies: of each
    sample, [trained tokens]. A token that no other of its group has is given its own reward as
    baseline, and so nothing to learn.
    """
    baselines = {}
    for group in set(groups.tolist()):
        (members,) = (groups == group).nonzero(as_tuple=True)
        weights = pad_sequence([energies[i].double().cumsum(0) for i in members.tolist()])
        baselines[group] = (weights @ rewards[members].double()) / weights.sum(1).clamp(min=1e-8)
    return baselines


def best_of_group(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """The best of a group gets its lead, r - the second best, the others 0 (Tang et al. 2025; verl
    `grpo_passk`).

    What the best adds to the largest of k rewards, so that the group is paid for its best try.
    Where two are best there is no lead. normalize_std: divide by the group's (unbiased std + 1e-6).
    rewards: [samples] float; groups: [samples] int, any order, any size. Returns [samples]. A group
    of one gets 0.
    """
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    member, count = _membership(groups)
    least = rewards.new_full((len(count),), float("-inf"))
    best = least.scatter_reduce(0, member, rewards, "amax")[member]
    leads = rewards == best
    alone = _group_sum(leads.double(), member, count)[member] == 1
    second = least.scatter_reduce(0, member, torch.where(leads, float("-inf"), rewards), "amax")[
        member
    ]
    lead = torch.where(leads & alone & (count[member] > 1), rewards - second, 0.0)
    if not normalize_std:
        return lead
    deviation = _group_std(_centred(rewards, member, count), member, count)
    return lead / (deviation[member] + STD_EPS).float()


def nonzero_scaled(rewards: Tensor, groups: Tensor) -> Tensor:
    """(r - mean(group)) * samples / rewards that are not 0, of the whole batch (GPG, Chu et al.
    2025; verl `gpg`).

    Responses without a reward have little to teach: the others weigh the more, the fewer they are.
    rewards: [samples] float; groups: [samples] int. Returns [samples]. A group of one gets 0 (verl
    gives it its reward).
    """
    rewarded = int(torch.count_nonzero(rewards))
    return group_advantages(rewards, groups, normalize_std=False) * (
        rewards.numel() / max(rewarded, 1)
    )


def mean_scaled(rewards: Tensor, groups: Tensor) -> Tensor:
    """(r - mean(group)) / mean(group) (MaxRL, arXiv:2602.02710; prime-rl `max_rl`).

    Of right and wrong answers (1, 0) its gradient is the maximum likelihood's, cut off at the order
    of the group's size: a prompt that is solved with chance p weighs 1 / p. rewards: [samples]
    float, not negative; groups: [samples] int. Returns [samples]. A group of one gets 0, and so
    does one whose mean is 0 or less.
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
    """Sum of weight * group advantage over the parts of a reward, each normalized for itself (GDPO,
    arXiv:2601.05242; verl `gdpo`, TRL `normalize_then_sum`), to be whitened afterwards.

    So no part drowns another by its scale, and two mixtures with the same sum differ. parts:
    [samples, parts]; groups: [samples] int. Returns [samples].
    """
    columns = [group_advantages(part, groups, normalize_std=normalize_std) for part in parts.T]
    weighted = [weight * column for weight, column in zip(weights, columns, strict=True)]
    return torch.stack(weighted).sum(0)


def _membership(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Which group each sample is in, numbered from 0: [samples]; and the size of each group:
    [groups].
    """
    _, member, count = torch.unique(groups, return_inverse=True, return_counts=True)
    return member, count


def _centred(rewards: Tensor, member: Tensor, count: Tensor) -> Tensor:
    """Rewards less the mean of their group; 0 in a group of one. [samples] float64"""
    values = rewards.double()
    return torch.where(
        count[member] > 1, values - (_group_sum(values, member, count) / count)[member], 0.0
    )


def _group_std(centred: Tensor, member: Tensor, count: Tensor) -> Tensor:
    """Unbiased, 0 for a group of one. centred: `_centred`. [groups] float64"""
    return (_group_sum(centred.square(), member, count) / (count - 1).clamp(min=1)).sqrt()


def _group_sum(values: Tensor, member: Tensor, count: Tensor) -> Tensor:
    return values.new_zeros(len(count)).index_add_(0, member, values)


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over unmasked values. Those of ranks add up: all-reduce them before `whiten`."""

    count: Tensor
    total: Tensor
    squares: Tensor

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    @property
    def mean(self) -> Tensor:
        """0 where there are no values."""
        return self.total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """Unbiased; 0 for fewer than two values."""
        spread = (self.squares / self.count.clamp(min=1) - self.mean * self.mean).clamp(min=0)
        return spread * self.count / (self.count - 1).clamp(min=1)


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Count, sum and sum of squares of the unmasked values, in double precision. values, mask: any
    equal shapes; a masked value may be anything.
    """
    kept = torch.where(mask > 0, values.double(), 0.0)
    return Moments((mask > 0).double().sum(), kept.sum(), (kept * kept).sum())


def whiten(values: Tensor, batch: Moments) -> Tensor:
    """Values shifted to mean 0 and scaled to variance 1 over the whole batch (slime
    `distributed_masked_whiten`).

    batch: `moments` of all values of the optimizer step, over all ranks. The variance is unbiased.
    A batch of fewer than two values, or of equal ones, becomes all 0.
    """
    if batch.count < 2:
        return torch.zeros_like(values)
    return ((values - batch.mean) * torch.rsqrt(batch.variance + WHITEN_EPS)).to(values.dtype)
