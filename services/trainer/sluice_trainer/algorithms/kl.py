"""Estimates of KL(pi || ref) from log-probs of sampled tokens, and an adaptive coefficient.

Schulman, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLType = Literal["k1", "k2", "k3", "low_var_kl"]
# low_var_kl is clamped to [-10, 10] (slime, verl).
LOW_VAR_LIMIT = 10.0
# Limit of the controller's relative error (Ziegler et al. 2019).
ERROR_LIMIT = 0.2
# For low_var_kl, d is clamped to [-20, 20] (verl), so that exp(-d) stays finite. The estimate is
# clamped there in any case.
LOG_RATIO_LIMIT = 20.0


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KLType, ratio: Tensor | None = None
) -> Tensor:
    """Estimate the KL at each token, with d = log_probs - ref_log_probs.

    k1: d. k2: d^2/2. k3: exp(-d) - 1 + d. low_var_kl: k3 clamped to [-10, 10]; the gradient of a
    clamped value is 0.

    Parameters
    ----------
    log_probs
        [tokens], with gradient.
    ref_log_probs
        [tokens], log-probs under the reference.
    kind
        Which estimate.
    ratio
        [tokens], pi / pi_old, with gradient; multiplies the estimate before the clamp, which makes
        its gradient unbiased off-policy (DeepSeek-V3.2).

    Returns
    -------
    [tokens].

    """
    d = log_probs - ref_log_probs
    if kind == "low_var_kl":
        # Without this clamp the gradient is inf * 0 = nan from d = -89 on, as slime's is.
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
    """Return the next coefficient of the KL penalty.

    coef * (1 + clip(divergence / target - 1, -0.2, 0.2) * sequences / horizon), and at least 0
    (Ziegler et al. 2019, section 2.2; verl's `AdaptiveKLController`). The coefficient rises if the
    KL is above its target and falls if it is below.

    Parameters
    ----------
    coef
        Coefficient of this step.
    divergence
        Mean KL over the trained tokens of the batch.
    sequences
        Sequences of the batch.
    target
        KL to aim at.
    horizon
        Sequences over which the coefficient adapts.

    """
    error = min(max(divergence / target - 1, -ERROR_LIMIT), ERROR_LIMIT)
    return max(coef * (1 + error * sequences / horizon), 0.0)
