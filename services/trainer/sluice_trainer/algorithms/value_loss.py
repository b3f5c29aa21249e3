"""The critic's loss, and the share of the returns that its values explain."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sluice_trainer.algorithms.advantages import Moments

# Added to the variance of the returns (verl).
EXPLAINED_EPS = 1e-5


class ValueLoss(NamedTuple):
    """The value loss, [tokens]; `clipped` is 1.0 if the clipped term was the larger one."""

    loss: Tensor
    clipped: Tensor


def clipped_value_loss(
    predictions: Tensor, values: Tensor, returns: Tensor, *, clip: float
) -> ValueLoss:
    """Compute max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2.

    verl's `compute_value_loss`; slime has no half.

    Parameters
    ----------
    predictions
        [tokens], v: values under the current critic, with gradient.
    values
        [tokens], old: values under the critic before the step.
    returns
        [tokens], R.
    clip
        How far a value may move from the value before the step.

    """
    bounded = torch.maximum(torch.minimum(predictions, values + clip), values - clip)
    unclipped_loss = (predictions - returns).square()
    clipped_loss = (bounded - returns).square()
    return ValueLoss(
        torch.maximum(unclipped_loss, clipped_loss) / 2, (clipped_loss > unclipped_loss).float()
    )


def explained_variance(returns: Moments, errors: Moments) -> float:
    """Return 1 - Var(returns - values) / (Var(returns) + 1e-5); 1 is a perfect critic.

    verl's `critic/vf_explained_var`.
    """
    return float(1 - errors.variance / (returns.variance + EXPLAINED_EPS))
