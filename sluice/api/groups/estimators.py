"""The estimators of advantages, and what the rest of a job must know of each. To add one: a word, a
record, a function.

The function is in the trainer (`sluice_trainer/algorithms/estimators.py`).
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
    """One estimator.

    grouped: it compares the responses to a prompt, so that one alone teaches nothing.
    whitened: its advantages are, by definition.
    discounts: it looks at single tokens' returns, and so at gamma.
    smooths: it takes a lambda.
    critic: it has a value model.
    greedy: it compares each response with the greedy one to the same prompt.
    parts: it looks at parts of the reward, each for itself.
    energies: it weighs tokens by the gradient they have brought, which takes one more forward pass.
    token_kl: `kl.coef` comes off token by token; else off the response's reward beforehand.
    turns: it can give each turn an advantage of its own.
    loss, aggregation: the ones that it comes with.
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
    """The names of those estimators, for rules that an API server reads."""
    return tuple(name for name, kind in ESTIMATORS.items() if those(kind))
