"""Losses of preferences: preferred answers become more likely, or get a higher reward.

The sequences of a micro-batch are pairs, the chosen answer first; with kto they are single answers.
What a loss compares is a score of each answer: its log-prob, how much more likely it is than under
the reference, or its reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from sluice.api.groups.losses import WITH_REFERENCE, Loss, LossType, Preference
from sluice_trainer.algorithms.aggregation import reduce_tokens
from sluice_trainer.algorithms.objective import LossInputs, Objective, zero_masked_tokens

# Share of desirable answers of a step.
DESIRABLE = "desirable_ratio"


class Pairs(NamedTuple):
    """A number of each chosen and each rejected answer, [pairs] each."""

    chosen: Tensor
    rejected: Tensor

    def mean(self, lengths: Pairs) -> Pairs:
        """Return sums over tokens as means."""
        return Pairs(self.chosen / lengths.chosen, self.rejected / lengths.rejected)


def preference_objective(
    log_probs: Tensor, entropy: Tensor, inputs: LossInputs, loss: Loss
) -> Objective:
    """Compute the mean loss over pairs, and metrics with TRL's names.

    Parameters
    ----------
    log_probs
        [tokens], at temperature 1, with gradient.
    entropy
        [tokens].
    inputs
        Further inputs of the loss.
    loss
        `algorithm.loss`.

    """
    if loss.type == "kto":
        return kto_objective(log_probs, entropy, inputs, loss.preferences)
    log_probs, inputs = zero_masked_tokens(log_probs, inputs)
    settings, lengths = loss.preferences, answer_lengths(inputs)
    assert settings.beta is not None
    own = answer_sums(log_probs, inputs)
    if loss.type in WITH_REFERENCE:
        if inputs.ref_log_probs is None:
            raise ValueError(f"algorithm.loss.type: {loss.type} needs the reference's log-probs")
        reference = answer_sums(inputs.ref_log_probs, inputs)
        rewarded = Pairs(own.chosen - reference.chosen, own.rejected - reference.rejected)
        scores = rewarded.mean(lengths) if settings.length_normalized else rewarded
    else:
        own = rewarded = scores = own.mean(lengths)
    losses, metrics = _losses(scores, loss.type, settings)
    metrics |= {
        **reward_metrics(Pairs(settings.beta * rewarded.chosen, settings.beta * rewarded.rejected)),
        "logps/chosen": own.chosen,
        "logps/rejected": own.rejected,
    }
    return mean_objective(losses, metrics, inputs, entropy)


def _losses(
    scores: Pairs, kind: LossType | None, settings: Preference
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair, and terms of it as metrics."""
    beta = settings.beta
    assert beta is not None
    match kind:
        case "dpo":
            return dpo_loss(scores, beta, settings.label_smoothing), {}
        case "ipo":
            return ipo_loss(scores, beta), {}
        case "simpo":
            assert settings.margin is not None
            return simpo_loss(scores, beta, settings.margin, settings.label_smoothing), {}
        case "orpo":
            return orpo_loss(scores, beta)
    raise ValueError(f"{kind} is no loss of pairs")


def mean_objective(
    losses: Tensor,
    metrics: Mapping[str, Tensor],
    inputs: LossInputs,
    entropy: Tensor | None = None,
) -> Objective:
    """Return the mean of losses and metrics over the optimizer step's samples.

    losses, metrics: [samples] of the micro-batch; entropy: [tokens].
    """

    def mean(values: Tensor) -> Tensor:
        return values.sum() * inputs.sample_weight

    loss = mean(losses)
    sums = {name: mean(values.detach()) for name, values in metrics.items()}
    if entropy is not None:
        sums["entropy_loss"] = reduce_tokens(entropy.detach(), inputs.metric_weights)
    return Objective(loss, {"loss": loss.detach().clone(), **sums})


def kto_objective(
    log_probs: Tensor, entropy: Tensor, inputs: LossInputs, settings: Preference
) -> Objective:
    """Compute the loss of Kahneman-Tversky optimisation (Ethayarajh et al. 2024, eq. 8).

    With r = log pi - log pi_ref of an answer and z the KL from the reference, a desirable answer
    costs desirableWeight * (1 - sigmoid(beta * (r - z))), another one undesirableWeight * (1 -
    sigmoid(beta * (z - r))). The parameters are those of `preference_objective`.
    """
    log_probs, inputs = zero_masked_tokens(log_probs, inputs)
    if inputs.ref_log_probs is None:
        raise ValueError("algorithm.loss.type: kto needs the reference's log-probs")
    assert settings.beta is not None
    own = _by_sequence(log_probs, inputs)
    ratio = own - _by_sequence(inputs.ref_log_probs, inputs)
    # The label, 0 or 1, is the mean over the answer's tokens of what is equal at all of them.
    counts = _by_sequence(inputs.mask.to(own.dtype), inputs).clamp(min=1)
    desirable = _by_sequence(inputs.advantages, inputs) / counts
    losses = kto_loss(ratio, desirable > 0.5, inputs.reference_kl, settings)
    rewards = settings.beta * ratio.detach()
    metrics = {
        DESIRABLE: desirable,
        "rewards/chosen": rewards * desirable,
        "rewards/rejected": rewards * (1 - desirable),
        "logps/chosen": own * desirable,
        "logps/rejected": own * (1 - desirable),
        "kl": torch.full_like(own, inputs.reference_kl),
    }
    return mean_objective(losses, metrics, inputs, entropy)


def kto_loss(ratio: Tensor, desirable: Tensor, kl: float, settings: Preference) -> Tensor:
    """Return the loss of each answer, [answers]; `kto_objective` has the formula."""
    assert settings.beta is not None
    gain = settings.desirable_weight * (1 - torch.sigmoid(settings.beta * (ratio - kl)))
    harm = settings.undesirable_weight * (1 - torch.sigmoid(settings.beta * (kl - ratio)))
    return torch.where(desirable, gain, harm)


def with_means_by_label(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of kto's step as means over desirable and over other answers.

    Those of a label that no answer has are left out.
    """
    if DESIRABLE not in metrics:
        return metrics
    share = metrics[DESIRABLE]
    result = dict(metrics)
    for kind, of_kind in (("chosen", share), ("rejected", 1 - share)):
        for name in (f"rewards/{kind}", f"logps/{kind}"):
            total = result.pop(name)
            if of_kind > 0:
                result[name] = total / of_kind
    if 0 < share < 1:
        result["rewards/margins"] = result["rewards/chosen"] - result["rewards/rejected"]
    return result


def reward_model_objective(rewards: Tensor, inputs: LossInputs, settings: Preference) -> Objective:
    """Compute the loss of a reward model: -log sigmoid(chosen - rejected - margin).

    It is the likelihood of the preferences under Bradley and Terry's model, with the margin of
    Llama 2 (Touvron et al. 2023, eq. 2). `centering` times the squared sum of both rewards keeps
    them near 0 (Eisenstein et al. 2023).

    rewards: [sequences], the reward of each answer, with gradient.
    """
    pairs, margins = answer_sums(rewards, inputs), answer_sums(inputs.advantages, inputs)
    losses = -logsigmoid(pairs.chosen - pairs.rejected - margins.chosen)
    if settings.centering:
        losses = losses + settings.centering * (pairs.chosen + pairs.rejected).square()
    return mean_objective(losses, reward_metrics(pairs), inputs)


def answer_sums(values: Tensor, inputs: LossInputs) -> Pairs:
    """Sum [tokens], 0 at masked ones, over each answer."""
    return Pairs(*_by_sequence(values, inputs).view(-1, 2).unbind(1))


def answer_lengths(inputs: LossInputs) -> Pairs:
    """Return the trained tokens of each answer, at least 1."""
    lengths = _by_sequence(inputs.mask.to(inputs.metric_weights.dtype), inputs).clamp(min=1)
    return Pairs(*lengths.view(-1, 2).unbind(1))


def _by_sequence(values: Tensor, inputs: LossInputs) -> Tensor:
    """Sum [tokens] over each sequence: [sequences]."""
    return values.new_zeros(inputs.sequences).index_add(0, inputs.sequence, values)


def dpo_loss(ratios: Pairs, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Direct preference optimisation (Rafailov et al. 2023, eq. 7), [pairs].

    With label smoothing a share of the pairs is taken to be the wrong way round (conservative DPO,
    Mitchell 2023). `ratios` are log pi - log pi_ref.
    """
    margin = beta * (ratios.chosen - ratios.rejected)
    right, wrong = -logsigmoid(margin), -logsigmoid(-margin)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def ipo_loss(ratios: Pairs, beta: float) -> Tensor:
    """Identity preference optimisation (Azar et al. 2023, eq. 17), [pairs].

    `ratios` are log pi - log pi_ref, by default means over tokens, as in TRL.
    """
    return (ratios.chosen - ratios.rejected - 1 / (2 * beta)).square()


def simpo_loss(
    log_probs: Pairs, beta: float, margin: float, label_smoothing: float = 0.0
) -> Tensor:
    """Simple preference optimisation (Meng et al. 2024, eq. 6), [pairs].

    `log_probs` are means over the tokens of each answer; `margin` is the paper's gamma.
    """
    difference = beta * (log_probs.chosen - log_probs.rejected) - margin
    right, wrong = -logsigmoid(difference), -logsigmoid(-difference)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def orpo_loss(log_probs: Pairs, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Odds-ratio preference optimisation (Hong et al. 2024, eq. 6), [pairs], and its terms.

    `log_probs` are means over the tokens of each answer. The first term is the mean loss of the
    chosen answer's tokens, the second `beta` times -log sigmoid of the log of the odds ratio.
    """
    log_odds = log_probs.chosen - log_probs.rejected
    log_odds = log_odds - (_log1mexp(log_probs.chosen) - _log1mexp(log_probs.rejected))
    terms = {"nll_loss": -log_probs.chosen, "log_odds_ratio": logsigmoid(log_odds)}
    return terms["nll_loss"] - beta * terms["log_odds_ratio"], terms


def _log1mexp(values: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of x <= 0 without cancellation (Maechler 2012).

    A log-prob of 0 has no finite odds, so x is at most -1e-7.
    """
    values = values.clamp(max=-1e-7)
    small = values > -0.6931472
    near_zero = torch.log(-torch.expm1(torch.where(small, values, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(small, -1.0, values)))
    return torch.where(small, near_zero, far)


def reward_metrics(rewards: Pairs) -> dict[str, Tensor]:
    """Return metrics of each pair's rewards, with TRL's names."""
    return {
        "rewards/chosen": rewards.chosen,
        "rewards/rejected": rewards.rejected,
        "rewards/margins": rewards.chosen - rewards.rejected,
        "rewards/accuracies": (rewards.chosen > rewards.rejected).float(),
    }
