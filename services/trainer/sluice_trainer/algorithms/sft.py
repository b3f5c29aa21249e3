"""Supervised fine-tuning (`algorithm.loss.type: sft`): the likelihood of given answers."""

from __future__ import annotations

from torch import Tensor

from sluice.api import Algorithm
from sluice_trainer.algorithms.aggregation import reduce_tokens
from sluice_trainer.algorithms.objective import (
    LossInputs,
    Objective,
    with_terms,
    within_mask,
)


def sft_objective(
    log_probs: Tensor, entropy: Tensor, inputs: LossInputs, algorithm: Algorithm
) -> Objective:
    """Return the mean of -log pi over trained tokens, - entropyCoef * entropy + kl.lossCoef * kl.

    slime's `sft_loss_function`; with `token_mean`, the default, its `--calculate-per-token-loss`,
    and verl's SFT trainer, which divides by the trained tokens of the whole batch. log_probs, with
    gradient, and entropy: [tokens], at temperature 1. `nll` is the same mean without further terms;
    its exponential is the perplexity.
    """
    log_probs, inputs = within_mask(log_probs, inputs)
    likelihood = reduce_tokens(-log_probs, inputs.loss_weights)
    loss, terms = with_terms(
        likelihood, log_probs, log_probs - log_probs.detach(), entropy, inputs, algorithm
    )
    metrics = {"nll": -log_probs, "entropy_loss": entropy}
    sums = {name: term.detach().clone() for name, term in {"loss": loss, **terms}.items()}
    sums |= {
        name: reduce_tokens(values.detach(), inputs.metric_weights)
        for name, values in metrics.items()
    }
    return Objective(loss, sums)
