"""The critic's loss, and how much of the returns its values explain."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sluice_trainer.algorithms.advantages import Moments

EXPLAINED_EPS = 1e-5
"""Added to the variance of the returns (verl)."""


class ValueLoss(NamedTuple):
    """loss, clipped: [tokens]. clipped is 1.0 where the clipped term was the larger one."""

    loss: Tensor
    clipped: Tensor


def clipped_value_loss(
    predictions: Tensor, values: Tensor, returns: Tensor, *, clip: float
) -> ValueLoss:
    """max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2 (verl `compute_value_loss`;
    slime: no half).

    predictions: of the present critic, with gradient; values: of the critic before the step;
    returns. All [tokens].
    """
    bounded = torch.maximum(torch.minimum(predictions, values + clip), values - clip)
    unclipped_loss = (predictions - returns).square()
    clipped_loss = (bounded - returns).square()
    return ValueLoss(
        torch.maximum(unclipped_loss, clipped_loss) / 2, (clipped_loss > unclipped_loss).float()
    )


def explained_variance(returns: Moments, errors: Moments) -> float:
    """1 - Var(returns - values) / (Var(returns) + 1e-5) (verl `critic/vf_explained_var`); 1 is a
    perfect critic.
    """
    return float(1 - errors.variance / (returns.variance + EXPLAINED_EPS))
