"""Supervised fine-tuning (`algorithm.loss.type: sft`): the likelihood of given answers."""

from __future__ import annotations

import math

from torch import Tensor

from sluice.api import Algorithm
from sluice_trainer.algorithms.aggregation import reduce_tokens
from sluice_trainer.algorithms.objective import (
    LossInputs,
    Objective,
    add_entropy_and_kl,
    metric_sums,
    zero_masked_tokens,
)

# exp of a larger loss would overflow, so a perplexity is at most exp of this.
_LARGEST_LOG = 700.0


def with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics with the perplexity `ppl` in place of sft's `nll`, if there is one."""
    if "nll" not in metrics:
        return metrics
    others = {name: value for name, value in metrics.items() if name != "nll"}
    return others | {"ppl": math.exp(min(metrics["nll"], _LARGEST_LOG))}


def sft_objective(
    log_probs: Tensor, entropy: Tensor, inputs: LossInputs, algorithm: Algorithm
) -> Objective:
    """Compute mean(-log pi) - entropyCoef * entropy + kl.lossCoef * kl over trained tokens.

    slime's `sft_loss_function`, with `token_mean`, the default, its `--calculate-per-token-loss`;
    and verl's SFT trainer, which divides by the trained tokens of the whole batch. The metric `nll`
    is the mean without the other terms; its exponential is the perplexity.

    Parameters
    ----------
    log_probs
        [tokens], at temperature 1, with gradient.
    entropy
        [tokens].
    inputs
        Further inputs of the loss.
    algorithm
        Settings.

    """
    log_probs, inputs = zero_masked_tokens(log_probs, inputs)
    likelihood = reduce_tokens(-log_probs, inputs.loss_weights)
    log_ratio = log_probs - log_probs.detach()  # the old policy is the current one
    loss, terms = add_entropy_and_kl(likelihood, log_probs, log_ratio, entropy, inputs, algorithm)
    metrics = {"nll": -log_probs, "entropy_loss": entropy}
    return Objective(loss, metric_sums({"loss": loss, **terms}, metrics, inputs))
