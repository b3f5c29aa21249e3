"""The loss of one packed micro-batch: policy gradient, entropy, KL; or the critic's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.api import Algorithm
from sluice.api.groups.losses import Gate
from sluice.api.groups.off_policy import OffPolicy
from sluice_trainer.algorithms.aggregation import reduce_tokens
from sluice_trainer.algorithms.distillation import distilled_advantages, reverse_kl
from sluice_trainer.algorithms.kl import kl_estimate
from sluice_trainer.algorithms.policy_loss import (
    Correction,
    PolicyLoss,
    bounded,
    cispo_loss,
    clip_cov_loss,
    clipped_surrogate,
    correction_ratio,
    dppo_loss,
    geo_mean_loss,
    kl_cov_loss,
    masked_sequences,
    normalized,
    off_policy_correction,
    reinforce_loss,
    sapo_loss,
    sequence_log_ratio,
)
from sluice_trainer.algorithms.rejection import probability_distance, rejected, vetoed
from sluice_trainer.algorithms.value_loss import clipped_value_loss


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The input of a micro-batch's loss besides the model's output. All [tokens] over packed
    response tokens.

    loss_weights, metric_weights: from `aggregation.token_weights`, 0 where masked. sequence: int,
    which sequence of the micro-batch a token belongs to. old_log_probs: of the weights at the start
    of the batch; None: the current ones (the ratio is then exactly 1). rollout_log_probs: from the
    engine. ref_log_probs: only with a KL loss. teacher_log_probs: only in a distillation. values,
    returns: only for a critic. on_policy_mask: 1.0 at tokens that the present
    weights sampled. covariance_mask: 1.0 at tokens that a loss by covariance has chosen from the
    whole optimizer step; mean_weight: of the step's off-policy weights, if they are normalized.
    """

    advantages: Tensor
    loss_weights: Tensor
    metric_weights: Tensor
    rollout_log_probs: Tensor
    sequence: Tensor
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    on_policy_mask: Tensor | None = None
    covariance_mask: Tensor | None = None
    mean_weight: float = 1.0

    @property
    def mask(self) -> Tensor:
        return self.metric_weights > 0


ON_POLICY = "on_policy_ratio"
DIFFERENCE_ON_POLICY = "train_rollout_logprob_abs_diff_on_policy"
CustomLoss = Callable[
    [Tensor, Tensor, LossInputs, Algorithm], Tensor | tuple[Tensor, dict[str, Tensor]]
]
"""`algorithm.loss.function`: (log_probs, entropy, inputs, algorithm) -> the loss of each token, and
metrics of each."""


@dataclass(frozen=True, slots=True)
class Objective:
    """loss: scalar with gradient. sums: add up over micro-batches and ranks; maxima: take the
    largest. All detached.
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Divergence(NamedTuple):
    """Of student and teacher over the whole vocabulary, [tokens]: what is minimised, with gradient;
    and reverse KL.
    """

    of_words: Tensor
    reverse_kl: Tensor


def policy_objective(
    log_probs: Tensor,
    entropy: Tensor,
    inputs: LossInputs,
    algorithm: Algorithm,
    custom: CustomLoss | None = None,
    divergence: Divergence | None = None,
) -> Objective:
    """Return pg_loss - entropyCoef * entropy + kl.lossCoef * kl (slime `policy_loss_function`).

    And + distillation.coef * divergence, where that is one over the whole vocabulary.

    log_probs, entropy: [tokens], of the current weights, already at the sampling temperature. The
    sums of all micro-batches of an optimizer step are its means, because the weights hold the
    denominators. Names are slime's. custom: stands in for the policy-gradient term.
    """
    log_probs, inputs = within_mask(log_probs, inputs)
    train_log_probs, old_log_probs = train_and_old_log_probs(log_probs, inputs, algorithm)
    inputs, taught = distilled(inputs, old_log_probs, algorithm)
    log_ratio = log_probs - old_log_probs
    if algorithm.policy_loss == "gspo" and custom is None:
        log_ratio = sequence_log_ratio(log_ratio, inputs.mask, inputs.sequence)
    difference = (train_log_probs - inputs.rollout_log_probs).abs()
    metrics = {
        "ppo_kl": -log_ratio,
        "entropy_loss": entropy,
        "train_rollout_logprob_abs_diff": difference,
        **taught,
    }
    if inputs.on_policy_mask is not None:
        metrics |= {
            ON_POLICY: inputs.on_policy_mask,
            DIFFERENCE_ON_POLICY: difference * inputs.on_policy_mask,
        }
    if custom is None:
        pg_tokens, shares = _policy_gradient(log_probs, log_ratio, inputs, algorithm)
    else:
        answer = custom(log_probs, entropy, inputs, algorithm)
        pg_tokens, shares = answer if isinstance(answer, tuple) else (answer, {})
    pg_tokens, corrections = _corrected(
        pg_tokens, train_log_probs, log_probs - old_log_probs, inputs, algorithm
    )
    metrics |= shares | corrections

    pg_loss = reduce_tokens(pg_tokens, inputs.loss_weights)
    loss, terms = with_terms(
        pg_loss, log_probs, log_probs - old_log_probs, entropy, inputs, algorithm
    )
    if algorithm.distillation and algorithm.distillation.whole:
        assert divergence is not None, (
            "a divergence over the whole vocabulary comes with the log-probs"
        )
        terms["opd_loss"] = reduce_tokens(divergence.of_words, inputs.loss_weights)
        loss = loss + algorithm.distillation.coef * terms["opd_loss"]
        metrics["opd_reverse_kl"] = divergence.reverse_kl
    sums = {
        name: term.detach().clone()
        for name, term in {"loss": loss, "pg_loss": pg_loss, **terms}.items()
    }
    sums |= {
        name: reduce_tokens(values.detach(), inputs.metric_weights)
        for name, values in metrics.items()
    }
    largest = difference.max() if difference.numel() else difference.new_zeros(())
    return Objective(loss, sums, {"train_rollout_logprob_abs_diff_max": largest.detach()})


def within_mask(log_probs: Tensor, inputs: LossInputs) -> tuple[Tensor, LossInputs]:
    """The same with log-prob 0, in every model, and advantage 0 for masked tokens.

    What is masked must not come near an exp: exp(100) is infinite in float32, and the gradient of
    infinity times a weight of 0 is no number, wherever the weight comes in later.
    """

    def kept(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(inputs.mask, values, 0.0)

    return torch.where(inputs.mask, log_probs, 0.0), replace(
        inputs,
        advantages=torch.where(inputs.mask, inputs.advantages, 0.0),
        rollout_log_probs=torch.where(inputs.mask, inputs.rollout_log_probs, 0.0),
        old_log_probs=kept(inputs.old_log_probs),
        ref_log_probs=kept(inputs.ref_log_probs),
        teacher_log_probs=kept(inputs.teacher_log_probs),
    )


def train_and_old_log_probs(
    log_probs: Tensor, inputs: LossInputs, algorithm: Algorithm
) -> tuple[Tensor, Tensor]:
    """(log pi_train, log pi_old), [tokens] each: of the trainer at the start of the batch, and of
    the ratio.
    """
    train_log_probs = log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs
    return (
        train_log_probs,
        inputs.rollout_log_probs
        if algorithm.off_policy.old_log_probs == "rollout"
        else train_log_probs,
    )


def distilled(
    inputs: LossInputs, old_log_probs: Tensor, algorithm: Algorithm
) -> tuple[LossInputs, dict[str, Tensor]]:
    """The inputs with what the teacher adds to their advantages, and its metric (slime's name)."""
    if algorithm.distillation is None or algorithm.distillation.whole:
        return inputs, {}
    if inputs.teacher_log_probs is None:
        raise ValueError("algorithm.distillation needs the teacher's log-probs")
    divergence = reverse_kl(old_log_probs, inputs.teacher_log_probs, inputs.mask)
    advantages = distilled_advantages(inputs.advantages, divergence, algorithm.distillation.coef)
    return replace(inputs, advantages=advantages), {"opd_reverse_kl": divergence}


def _policy_gradient(
    log_probs: Tensor, log_ratio: Tensor, inputs: LossInputs, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss of each token before any correction, and its metrics. log_ratio: of gspo, the
    sequence's.
    """
    clip, gate = algorithm.loss.clip, algorithm.loss.gate or Gate()
    advantages = inputs.advantages
    high = clip.highest
    old_log_probs, log_ratio = log_probs - log_ratio, bounded(log_ratio)
    ratio = torch.exp(log_ratio)
    match algorithm.policy_loss:
        case "ppo" | "gspo":
            pg = clipped_surrogate(ratio, advantages, low=clip.low, high=high, dual=clip.dual)
        case "cispo":
            pg = cispo_loss(log_probs, ratio, advantages, low=clip.low, high=high)
        case "reinforce":
            pg = reinforce_loss(log_probs, advantages)
        case "geo_mean":
            pg = geo_mean_loss(
                log_ratio, advantages, inputs.mask, inputs.sequence, low=clip.low, high=high
            )
        case "sapo":
            pg = sapo_loss(ratio, advantages, positive=gate.positive, negative=gate.negative)
        case "dppo_tv" | "dppo_kl" as loss:
            moved = probability_distance(log_probs, old_log_probs, loss)
            pg = dppo_loss(
                log_probs, ratio, advantages, moved, low=clip.low, high=high, most=clip.dual
            )
        case "clip_cov":
            pg = clip_cov_loss(ratio, advantages, _covariance_mask(inputs), low=clip.low, high=high)
        case "kl_cov":
            pg = kl_cov_loss(log_ratio, advantages, _covariance_mask(inputs))
    return pg.loss, _clip_metrics(pg) | (
        {} if inputs.covariance_mask is None else {"cov_frac": inputs.covariance_mask}
    )


def _covariance_mask(inputs: LossInputs) -> Tensor:
    if inputs.covariance_mask is None:
        raise ValueError("a loss by covariance needs the covariance mask of the step")
    return inputs.covariance_mask


def _clip_metrics(pg: PolicyLoss) -> dict[str, Tensor]:
    lower = {} if pg.bounded is None else {"pg_clipfrac_lower": pg.bounded}
    return {"pg_clipfrac": pg.clipped, **lower}


def _corrected(
    loss: Tensor,
    train_log_probs: Tensor,
    log_ratio: Tensor,
    inputs: LossInputs,
    algorithm: Algorithm,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss times its off-policy corrections, and their metrics.

    train_log_probs: log pi_train; log_ratio: log pi - log pi_old. Both [tokens].
    """
    off_policy, metrics = algorithm.off_policy, {}
    rollout, mask, sequence = inputs.rollout_log_probs, inputs.mask, inputs.sequence
    if off_policy.opsm_delta is not None:
        dropped = masked_sequences(
            log_ratio, inputs.advantages, mask, sequence, off_policy.opsm_delta
        )
        loss = loss * (1 - dropped)
        metrics["opsm_clipfrac"] = dropped
    if off_policy.method != "none":
        correction = correction_of(train_log_probs, inputs, off_policy)
        loss = loss * (
            normalized(correction.weight, inputs.mean_weight)
            if off_policy.normalize
            else correction.weight
        )
        metrics |= {
            "ois": torch.exp(bounded(log_ratio)),
            "tis": correction.ratio,
            "tis_clipfrac": correction.bounded,
            "tis_abs": (correction.ratio - 1).abs(),
        }
    if off_policy.reject:
        metrics["rs_clipfrac"] = rejected(
            train_log_probs, rollout, mask, sequence, off_policy.reject
        )
        loss = loss * (1 - metrics["rs_clipfrac"])
    if off_policy.veto is not None:
        metrics["veto_clipfrac"] = vetoed(train_log_probs, rollout, mask, sequence, off_policy.veto)
        loss = loss * (1 - metrics["veto_clipfrac"])
    return loss, metrics


def correction_of(train_log_probs: Tensor, inputs: LossInputs, off_policy: OffPolicy) -> Correction:
    """The weights of tis or icepop, not normalized. train_log_probs: log pi_train, [tokens]."""
    assert off_policy.method != "none"
    ratio = correction_ratio(
        train_log_probs - inputs.rollout_log_probs, off_policy.level, inputs.mask, inputs.sequence
    )
    return off_policy_correction(ratio, off_policy.method, low=off_policy.low, high=off_policy.high)


def with_terms(
    loss: Tensor,
    log_probs: Tensor,
    log_ratio: Tensor,
    entropy: Tensor,
    inputs: LossInputs,
    algorithm: Algorithm,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss with the entropy and KL terms that are on; the KL, as a metric. log_ratio: log pi -
    log pi_old.
    """
    terms = {}
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * reduce_tokens(entropy, inputs.loss_weights)
    if algorithm.kl.loss_coef > 0:
        terms["kl_loss"] = _kl_loss(log_probs, log_ratio, inputs, algorithm)
        loss = loss + algorithm.kl.loss_coef * terms["kl_loss"]
    return loss, terms


def _kl_loss(
    log_probs: Tensor, log_ratio: Tensor, inputs: LossInputs, algorithm: Algorithm
) -> Tensor:
    if inputs.ref_log_probs is None:
        raise ValueError("algorithm.kl.lossCoef needs the reference policy's log-probs")
    ratio = torch.exp(bounded(log_ratio)) if algorithm.kl.unbiased else None
    return reduce_tokens(
        kl_estimate(log_probs, inputs.ref_log_probs, algorithm.kl.type, ratio), inputs.loss_weights
    )


def value_objective(predictions: Tensor, inputs: LossInputs, *, clip: float) -> Objective:
    """The clipped value loss of a critic. predictions: [tokens], of the current critic, with
    gradient.

    Names are verl's: vf_loss, vf_clipfrac, vpred_mean.
    """
    if inputs.values is None or inputs.returns is None:
        raise ValueError("a critic learns from the values before the step and the returns")
    tokens = clipped_value_loss(predictions, inputs.values, inputs.returns, clip=clip)
    loss = reduce_tokens(tokens.loss, inputs.loss_weights)
    sums = {"loss": loss.detach().clone(), "vf_loss": loss.detach().clone()}
    metrics = {"vf_clipfrac": tokens.clipped, "vpred_mean": predictions.detach()}
    return Objective(
        loss, sums | {n: reduce_tokens(v, inputs.metric_weights) for n, v in metrics.items()}
    )
