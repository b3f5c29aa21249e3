"""The loss of one packed micro-batch: policy gradient, entropy and KL, or the critic's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    cispo_loss,
    clamp_log_ratio,
    clip_cov_loss,
    clipped_surrogate,
    correction_ratio,
    dppo_loss,
    geo_mean_loss,
    kl_cov_loss,
    normalize_weights,
    off_policy_correction,
    opsm_mask,
    reinforce_loss,
    sapo_loss,
    sequence_log_ratio,
)
from sluice_trainer.algorithms.rejection import probability_distance, rejection_mask, veto_mask
from sluice_trainer.algorithms.value_loss import clipped_value_loss


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a micro-batch's loss besides the model's output.

    All tensors are [tokens], over the packed response tokens.

    Attributes
    ----------
    advantages
        Advantage of each token; `TrainSequence.advantage` says what it is with other losses.
    loss_weights, metric_weights
        Weights of `aggregation.token_weights`; 0 at masked tokens.
    rollout_log_probs
        Log-probs under the engine that sampled the tokens.
    sequence
        int, index in the micro-batch of each token's sequence.
    old_log_probs
        Log-probs under the weights at the start of the batch; None: they are the current weights,
        so the ratio is exactly 1.
    ref_log_probs
        Log-probs under the reference; only with a KL loss.
    teacher_log_probs
        Log-probs under the teacher; only with distillation.
    values, returns
        The critic's values before the step, and its targets; only for a critic.
    on_policy_mask
        1.0 at tokens that the weights before the step sampled.
    covariance_mask
        1.0 at tokens that a loss by covariance has selected from the whole optimizer step.
    mean_weight
        Mean of the step's off-policy weights; only if they are normalized.
    sequences
        Sequences of the micro-batch.
    sample_weight
        Weight of a sample in a mean over the optimizer step's samples.
    reference_kl
        Estimate of the KL from the reference, at least 0; only with kto.

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
    sequences: int = 0
    sample_weight: float = 1.0
    reference_kl: float = 0.0

    @property
    def mask(self) -> Tensor:
        return self.metric_weights > 0


ON_POLICY = "on_policy_ratio"
DIFFERENCE_ON_POLICY = "train_rollout_logprob_abs_diff_on_policy"
# `algorithm.loss.function`: (log_probs, entropy, inputs, algorithm) -> loss of each token, and
# metrics of each token.
CustomLoss = Callable[
    [Tensor, Tensor, LossInputs, Algorithm], Tensor | tuple[Tensor, dict[str, Tensor]]
]


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a micro-batch and its metrics.

    Attributes
    ----------
    loss
        Scalar with gradient.
    sums
        Metrics that add up over micro-batches and ranks. Detached.
    maxima
        Metrics whose largest value counts. Detached.

    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Divergence(NamedTuple):
    """The divergence of student and teacher over the whole vocabulary, [tokens].

    `of_words` has a gradient and is minimised; `reverse_kl` is a metric.
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
    """Compute pg_loss - entropyCoef * entropy + kl.lossCoef * kl (slime `policy_loss_function`).

    With distillation over the whole vocabulary, distillation.coef * divergence is added. The sums
    of all micro-batches of an optimizer step are means over it, because the weights of tokens hold
    the denominators. Metrics have slime's names.

    Parameters
    ----------
    log_probs
        [tokens], log-probs under the current weights at the sampling temperature, with gradient.
    entropy
        [tokens], entropies under the current weights.
    inputs
        Further inputs of the loss.
    algorithm
        Settings.
    custom
        Replaces the policy-gradient term.
    divergence
        Divergence from the teacher; only with distillation over the whole vocabulary.

    """
    log_probs, inputs = zero_masked_tokens(log_probs, inputs)
    train_log_probs, old_log_probs = train_and_old_log_probs(log_probs, inputs, algorithm)
    inputs, teacher_metrics = with_teacher_advantages(inputs, old_log_probs, algorithm)
    token_log_ratio = log_probs - old_log_probs  # log pi - log pi_old
    if algorithm.policy_loss == "gspo" and custom is None:
        log_ratio = sequence_log_ratio(token_log_ratio, inputs.mask, inputs.sequence)
    else:
        log_ratio = token_log_ratio

    # The policy-gradient loss of each token.
    if custom is None:
        pg_tokens, pg_metrics = _policy_gradient(log_probs, log_ratio, inputs, algorithm)
    else:
        answer = custom(log_probs, entropy, inputs, algorithm)
        pg_tokens, pg_metrics = answer if isinstance(answer, tuple) else (answer, {})
    pg_tokens, correction_metrics = _corrected(
        pg_tokens, train_log_probs, token_log_ratio, inputs, algorithm
    )

    # The loss: a weighted sum over tokens, plus entropy, KL and distillation.
    pg_loss = reduce_tokens(pg_tokens, inputs.loss_weights)
    loss, terms = add_entropy_and_kl(
        pg_loss, log_probs, token_log_ratio, entropy, inputs, algorithm
    )
    if algorithm.distillation and algorithm.distillation.whole:
        assert divergence is not None, (
            "a divergence over the whole vocabulary comes with the log-probs"
        )
        terms["opd_loss"] = reduce_tokens(divergence.of_words, inputs.loss_weights)
        loss = loss + algorithm.distillation.coef * terms["opd_loss"]
        teacher_metrics["opd_reverse_kl"] = divergence.reverse_kl

    difference = (train_log_probs - inputs.rollout_log_probs).abs()
    metrics = {
        "ppo_kl": -log_ratio,
        "entropy_loss": entropy,
        "train_rollout_logprob_abs_diff": difference,
        **teacher_metrics,
        **pg_metrics,
        **correction_metrics,
    }
    if inputs.on_policy_mask is not None:
        metrics |= {
            ON_POLICY: inputs.on_policy_mask,
            DIFFERENCE_ON_POLICY: difference * inputs.on_policy_mask,
        }
    largest = difference.max() if difference.numel() else difference.new_zeros(())
    return Objective(
        loss,
        metric_sums({"loss": loss, "pg_loss": pg_loss, **terms}, metrics, inputs),
        {"train_rollout_logprob_abs_diff_max": largest.detach()},
    )


def metric_sums(
    terms: Mapping[str, Tensor], tokens: Mapping[str, Tensor], inputs: LossInputs
) -> dict[str, Tensor]:
    """Return the metrics of a micro-batch: scalars, and weighted sums over its tokens.

    Parameters
    ----------
    terms
        Terms of the loss, scalars.
    tokens
        Metrics of each token, [tokens].
    inputs
        Has the weights of tokens in metrics.

    """
    sums = {name: term.detach().clone() for name, term in terms.items()}
    return sums | {
        name: reduce_tokens(values.detach(), inputs.metric_weights)
        for name, values in tokens.items()
    }


def zero_masked_tokens(log_probs: Tensor, inputs: LossInputs) -> tuple[Tensor, LossInputs]:
    """Return the log-probs and inputs with all log-probs and advantages 0 at masked tokens.

    A masked value must not reach an exp: exp(100) is infinite in float32, and the gradient of
    infinity times a weight of 0 is nan, wherever the weight is applied later.
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
    """Return log pi_train and log pi_old, [tokens] each, detached.

    pi_train is the trainer's policy at the start of the batch. pi_old is the denominator of the
    ratio: pi_train, or the engine's policy with `offPolicy.oldLogProbs: rollout`.
    """
    train_log_probs = log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs
    if algorithm.off_policy.old_log_probs == "rollout":
        return train_log_probs, inputs.rollout_log_probs
    return train_log_probs, train_log_probs


def with_teacher_advantages(
    inputs: LossInputs, old_log_probs: Tensor, algorithm: Algorithm
) -> tuple[LossInputs, dict[str, Tensor]]:
    """Return the inputs with the teacher's part of the advantages, and its metric.

    Unchanged without distillation, or if it is over the whole vocabulary.
    """
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
    """Return the policy loss of each token before corrections, and its metrics.

    `log_ratio` is log pi - log pi_old, with gspo the sequence's.
    """
    clip, gate = algorithm.loss.clip, algorithm.loss.gate or Gate()
    advantages = inputs.advantages
    high = clip.highest
    old_log_probs, log_ratio = log_probs - log_ratio, clamp_log_ratio(log_ratio)
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
    lower = {} if pg.dual_clipped is None else {"pg_clipfrac_lower": pg.dual_clipped}
    return {"pg_clipfrac": pg.clipped, **lower}


def _corrected(
    loss: Tensor,
    train_log_probs: Tensor,
    log_ratio: Tensor,
    inputs: LossInputs,
    algorithm: Algorithm,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy loss times its off-policy corrections, and their metrics.

    `train_log_probs` is log pi_train and `log_ratio` log pi - log pi_old, both [tokens].
    """
    off_policy, metrics = algorithm.off_policy, {}
    rollout, mask, sequence = inputs.rollout_log_probs, inputs.mask, inputs.sequence
    if off_policy.opsm_delta is not None:
        dropped = opsm_mask(log_ratio, inputs.advantages, mask, sequence, off_policy.opsm_delta)
        loss = loss * (1 - dropped)
        metrics["opsm_clipfrac"] = dropped
    if off_policy.weighted:
        correction = importance_correction(train_log_probs, inputs, off_policy)
        loss = loss * (
            normalize_weights(correction.weight, inputs.mean_weight)
            if off_policy.normalize
            else correction.weight
        )
        metrics |= {
            "ois": torch.exp(clamp_log_ratio(log_ratio)),
            "tis": correction.ratio,
            "tis_clipfrac": correction.truncated,
            "tis_abs": (correction.ratio - 1).abs(),
        }
    if off_policy.reject:
        metrics["rs_clipfrac"] = rejection_mask(
            train_log_probs, rollout, mask, sequence, off_policy.reject
        )
        loss = loss * (1 - metrics["rs_clipfrac"])
    if off_policy.veto is not None:
        metrics["veto_clipfrac"] = veto_mask(
            train_log_probs, rollout, mask, sequence, off_policy.veto
        )
        loss = loss * (1 - metrics["veto_clipfrac"])
    return loss, metrics


def importance_correction(
    train_log_probs: Tensor, inputs: LossInputs, off_policy: OffPolicy
) -> Correction:
    """Return the weights of `offPolicy.method`, not normalized, from log pi_train, [tokens]."""
    assert off_policy.method == "tis" or off_policy.method == "icepop"
    ratio = correction_ratio(
        train_log_probs - inputs.rollout_log_probs, off_policy.level, inputs.mask, inputs.sequence
    )
    return off_policy_correction(ratio, off_policy.method, low=off_policy.low, high=off_policy.high)


def add_entropy_and_kl(
    loss: Tensor,
    log_probs: Tensor,
    log_ratio: Tensor,
    entropy: Tensor,
    inputs: LossInputs,
    algorithm: Algorithm,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss with the entropy and KL terms that are on, and the KL as a metric.

    `log_ratio` is log pi - log pi_old, [tokens].
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
    ratio = torch.exp(clamp_log_ratio(log_ratio)) if algorithm.kl.unbiased else None
    return reduce_tokens(
        kl_estimate(log_probs, inputs.ref_log_probs, algorithm.kl.type, ratio), inputs.loss_weights
    )


def value_objective(predictions: Tensor, inputs: LossInputs, *, clip: float) -> Objective:
    """Compute the clipped value loss of a critic.

    Metrics have verl's names: vf_loss, vf_clipfrac, vpred_mean.

    Parameters
    ----------
    predictions
        [tokens], values under the current critic, with gradient.
    inputs
        Further inputs of the loss.
    clip
        How far a value may move from the value before the step.

    """
    if inputs.values is None or inputs.returns is None:
        raise ValueError("a critic learns from the values before the step and the returns")
    tokens = clipped_value_loss(predictions, inputs.values, inputs.returns, clip=clip)
    loss = reduce_tokens(tokens.loss, inputs.loss_weights)
    metrics = {"vf_clipfrac": tokens.clipped, "vpred_mean": predictions}
    return Objective(loss, metric_sums({"loss": loss, "vf_loss": loss}, metrics, inputs))
