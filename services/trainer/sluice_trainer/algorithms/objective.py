"""The loss of one packed micro-batch: policy gradient, entropy, KL."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sluice.api import Algorithm
from sluice_trainer.algorithms.aggregation import reduce_tokens
from sluice_trainer.algorithms.kl import kl_estimate
from sluice_trainer.algorithms.policy_loss import clipped_surrogate, off_policy_correction


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the loss of a micro-batch needs besides the model's output. All [tokens] over packed response tokens.

    loss_weights, metric_weights: from `aggregation.token_weights`, 0 where masked. old_log_probs: of the weights at the
    start of the batch; None: the current ones (the ratio is then exactly 1). rollout_log_probs: from the engine.
    ref_log_probs: only with a KL loss.
    """

    advantages: Tensor
    loss_weights: Tensor
    metric_weights: Tensor
    rollout_log_probs: Tensor
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """loss: scalar with gradient. sums: add up over micro-batches and ranks; maxima: take the largest. All detached."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


def policy_objective(log_probs: Tensor, entropy: Tensor, inputs: LossInputs, algorithm: Algorithm) -> Objective:
    """Return pg_loss - entropyCoef * entropy + kl.lossCoef * kl (slime `policy_loss_function`).

    log_probs, entropy: [tokens], of the current weights, already at the sampling temperature. The sums of all
    micro-batches of an optimizer step are its means, because the weights hold the denominators. Names are slime's.
    """
    old = log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs
    ppo_kl = old - log_probs
    ratio = torch.exp(-ppo_kl)
    clip = algorithm.clip
    pg = clipped_surrogate(
        ratio, inputs.advantages, low=clip.low, high=clip.low if clip.high is None else clip.high, dual=clip.dual
    )
    difference = torch.where(inputs.metric_weights > 0, (old - inputs.rollout_log_probs).abs(), 0.0)
    metrics = {
        "pg_clipfrac": pg.clipped,
        "ppo_kl": ppo_kl,
        "entropy_loss": entropy,
        "train_rollout_logprob_abs_diff": difference,
    }
    pg_tokens, correction_metrics = _corrected(pg.loss, old, ratio, inputs, algorithm)
    metrics |= correction_metrics

    pg_loss = reduce_tokens(pg_tokens, inputs.loss_weights)
    loss = pg_loss
    terms = {"pg_loss": pg_loss}
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * reduce_tokens(entropy, inputs.loss_weights)
    if algorithm.kl.loss_coef > 0:
        if inputs.ref_log_probs is None:
            raise ValueError("algorithm.kl.lossCoef needs the reference policy's log-probs")
        kl = kl_estimate(log_probs, inputs.ref_log_probs, algorithm.kl.type, ratio if algorithm.kl.unbiased else None)
        terms["kl_loss"] = reduce_tokens(kl, inputs.loss_weights)
        loss = loss + algorithm.kl.loss_coef * terms["kl_loss"]

    sums = {name: term.detach().clone() for name, term in {"loss": loss, **terms}.items()}
    sums |= {name: reduce_tokens(values.detach(), inputs.metric_weights) for name, values in metrics.items()}
    largest = difference.max() if difference.numel() else difference.new_zeros(())
    return Objective(loss, sums, {"train_rollout_logprob_abs_diff_max": largest.detach()})


def _corrected(
    loss: Tensor, old: Tensor, ratio: Tensor, inputs: LossInputs, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss times its off-policy correction, and the metrics of the correction."""
    off_policy = algorithm.off_policy
    if off_policy.method == "none":
        return loss, {}
    correction = off_policy_correction(
        old, inputs.rollout_log_probs, off_policy.method, low=off_policy.low, high=off_policy.high
    )
    metrics = {
        "ois": ratio,
        "tis": correction.ratio,
        "tis_clipfrac": correction.bounded,
        "tis_abs": (correction.ratio - 1).abs(),
    }
    return loss * correction.weight, metrics
