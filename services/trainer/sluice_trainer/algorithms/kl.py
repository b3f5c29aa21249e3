"""Estimates of KL(pi || ref) from log-probs of sampled tokens (Schulman,
http://joschu.net/blog/kl-approx.html), and the controller that holds it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLType = Literal["k1", "k2", "k3", "low_var_kl"]
LOW_VAR_LIMIT = 10.0
"""low_var_kl is clamped to [-10, 10] (slime, verl)."""
ERROR_LIMIT = 0.2
"""Of the controller's relative error (Ziegler et al. 2019)."""
LOG_RATIO_LIMIT = 20.0
"""Where low_var_kl is clamped for certain: d beyond +-20 is taken for that (verl), so that exp(-d)
stays finite."""


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KLType, ratio: Tensor | None = None
) -> Tensor:
    """KL estimate of each token; d = log_probs - ref_log_probs.

    k1: d. k2: d^2/2. k3: exp(-d) - 1 + d. low_var_kl: k3 clamped to [-10, 10], where its gradient
    is 0; without the clamp of d it would be inf * 0 from d = -89 on, as slime's is. ratio: pi /
    pi_old; where given, the estimate is multiplied by it (before the clamp), which makes its
    gradient unbiased off-policy (DeepSeek-V3.2). All tensors [tokens]; gradients flow through
    log_probs and ratio.
    """
    d = log_probs - ref_log_probs
    if kind == "low_var_kl":
        d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match kind:
        case "k1":
            estimate = d
        case "k2":
            estimate = d.square() / 2
        case "k3" | "low_var_kl":
            estimate = torch.exp(-d) - 1 + d
        case _:
            raise ValueError(f"unknown KL type {kind!r}")
    if ratio is not None:
        estimate = ratio * estimate
    if kind == "low_var_kl":
        estimate = estimate.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
    return estimate


def adapted_coef(
    coef: float, divergence: float, sequences: int, *, target: float, horizon: int
) -> float:
    """The next coefficient of the KL penalty (Ziegler et al. 2019, section 2.2; verl's
    `AdaptiveKLController`).

    coef * (1 + clip(divergence / target - 1, -0.2, 0.2) * sequences / horizon): up where the KL is
    above its target, down where it is below. divergence: mean over the batch's trained tokens;
    sequences: of the batch. Never below 0, which a batch of more than 5 horizons would reach.
    """
    error = min(max(divergence / target - 1, -ERROR_LIMIT), ERROR_LIMIT)
    return max(coef * (1 + error * sequences / horizon), 0.0)
