"""Estimators of advantages, with the facts that the rest of a job needs.

To add an estimator: a name and an `EstimatorKind` here, and a function in the trainer
(`sluice_trainer/algorithms/estimators.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from sluice.api.groups.losses import PolicyLossName

EstimatorName = Literal[
    "grpo",
    "dr_grpo",
    "gspo",
    "cispo",
    "rloo",
    "opo",
    "gpg",
    "grpo_passk",
    "max_rl",
    "optimal_token_baseline",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "ppo",
    "custom",
]
Aggregation = Literal["sequence_mean", "prompt_mean", "token_mean", "token_sum", "token_sum_norm"]


@dataclass(frozen=True, slots=True)
class EstimatorKind:
    """Facts about an estimator.

    grouped: it compares the responses to a prompt, so that a single response teaches nothing.
    whitened: its advantages are whitened by definition.
    discounts: it uses the returns of single tokens, and so gamma.
    smooths: it uses lambda.
    critic: it has a value model.
    greedy: it compares each response with the greedy response to the same prompt.
    parts: it normalizes parts of the reward separately.
    energies: it weighs tokens by the gradient they have brought, which takes another forward pass.
    token_kl: `kl.coef` lowers the reward of each token, otherwise that of the whole response.
    turns: it can give each turn its own advantage.
    loss, aggregation: its defaults.
    """

    grouped: bool = True
    whitened: bool = False
    discounts: bool = False
    smooths: bool = False
    critic: bool = False
    greedy: bool = False
    parts: bool = False
    energies: bool = False
    token_kl: bool = False
    turns: bool = False
    loss: PolicyLossName = "ppo"
    aggregation: Aggregation = "sequence_mean"


ESTIMATORS: Mapping[EstimatorName, EstimatorKind] = {
    "grpo": EstimatorKind(turns=True),
    "dr_grpo": EstimatorKind(aggregation="token_sum_norm", turns=True),
    "gspo": EstimatorKind(loss="gspo"),
    "cispo": EstimatorKind(loss="cispo", turns=True),
    "rloo": EstimatorKind(turns=True),
    "opo": EstimatorKind(),
    "gpg": EstimatorKind(),
    "grpo_passk": EstimatorKind(),
    "max_rl": EstimatorKind(),
    "optimal_token_baseline": EstimatorKind(energies=True),
    "gdpo": EstimatorKind(whitened=True, parts=True, token_kl=True),
    "reinforce_plus_plus": EstimatorKind(
        grouped=False, whitened=True, discounts=True, token_kl=True
    ),
    "reinforce_plus_plus_baseline": EstimatorKind(whitened=True, token_kl=True, turns=True),
    "remax": EstimatorKind(grouped=False, greedy=True, token_kl=True),
    "ppo": EstimatorKind(grouped=False, discounts=True, smooths=True, critic=True, token_kl=True),
    "custom": EstimatorKind(grouped=False, discounts=True, smooths=True),
}


def estimators(those: Callable[[EstimatorKind], bool]) -> tuple[EstimatorName, ...]:
    """Return the names of the estimators for which a predicate holds."""
    return tuple(name for name, kind in ESTIMATORS.items() if those(kind))
