"""Advantages of whole responses: how much better one was than the others to the same prompt; and whitening.

These functions look only at rewards and group ids, so they run on a whole batch wherever its metadata are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPS = 1e-6
"""Added to a group's standard deviation (slime)."""
WHITEN_EPS = 1e-8
"""Added to the variance of a whitened batch (slime, verl)."""


def group_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """Group-relative advantages (GRPO, Shao et al. 2024, eq. 4; slime's unbiased std with eps 1e-6).

    rewards: [samples] float; groups: [samples] int, any order, any group size. Returns [samples].
    A group of one gets 0.
    """
    if rewards.shape != groups.shape:
        raise ValueError(f"{tuple(rewards.shape)} rewards but {tuple(groups.shape)} group ids")
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    member, count = _membership(groups)
    # In double precision: the rounding of a mean of equal rewards, divided by a std near 0, would be an advantage.
    values = rewards.double()
    centred = values - (_group_sum(values, member, count) / count)[member]
    centred = torch.where(count[member] > 1, centred, 0.0)
    if normalize_std:
        variance = _group_sum(centred.square(), member, count) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[member] + STD_EPS)
    return centred.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """A reward minus the mean of the *other* rewards of its group (RLOO, Ahmadian et al. 2024, eq. 9; verl `rloo`).

    r - mean(others) = (r - mean(group)) * n / (n - 1). rewards: [samples] float; groups: [samples] int, any order, any
    group size. Returns [samples]. A group of one gets 0: nothing is known about its prompt (verl gives it its reward).
    """
    centred = group_advantages(rewards, groups, normalize_std=False)
    if centred.numel() == 0:
        return centred
    member, count = _membership(groups)
    return centred * (count / (count - 1).clamp(min=1))[member].to(centred.dtype)


def _membership(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Which group each sample is in, numbered from 0: [samples]; and the size of each group: [groups]."""
    _, member, count = torch.unique(groups, return_inverse=True, return_counts=True)
    return member, count


def _group_sum(values: Tensor, member: Tensor, count: Tensor) -> Tensor:
    return values.new_zeros(len(count)).index_add_(0, member, values)


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over unmasked values. Those of ranks add up: all-reduce them before `whiten`."""

    count: Tensor
    total: Tensor
    squares: Tensor

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

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
    """Count, sum and sum of squares of the unmasked values, in double precision. values, mask: any equal shapes."""
    kept = values.double() * mask
    return Moments(mask.double().sum(), kept.sum(), (kept * kept).sum())


def whiten(values: Tensor, batch: Moments) -> Tensor:
    """Values shifted to mean 0 and scaled to variance 1 over the whole batch (slime `distributed_masked_whiten`).

    batch: `moments` of all values of the optimizer step, over all ranks. The variance is unbiased. A batch of fewer
    than two values, or of equal ones, becomes all 0.
    """
    if batch.count < 2:
        return torch.zeros_like(values)
    return ((values - batch.mean) * torch.rsqrt(batch.variance + WHITEN_EPS)).to(values.dtype)
