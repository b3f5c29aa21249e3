"""spec.algorithm.offPolicy: what becomes of samples that the present policy did not make."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model, NonNegativeFloat, PositiveFloat
from sluice.api.schema.rules import Rule, field, only_with, requires, written

Divergence = Literal["k1", "k2", "k3", "binary_kl"]
Scope = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


class Rejection(Model):
    """Tokens, or whole sequences, that are left out because trainer and engine
    see them too differently.
    """

    measure: Divergence = Field(
        "k1",
        description="Of d = log pi_train - log pi_rollout: k1: d, whose bounds are those of the "
        "ratio exp(d); k2: d^2 / 2; k3: exp(d) - 1 - d; binary_kl: KL of this token against all "
        "others, the larger of both ways.",
    )
    over: Scope = Field(
        "token", description="Of the token; or sum, mean or largest of its sequence's tokens."
    )
    low: PositiveFloat | None = Field(
        None, description="k1: kept from this ratio on. Default: 1 / high."
    )
    high: PositiveFloat = Field(description="Kept up to this value; k1: up to this ratio.")

    rules = (
        only_with(
            "low",
            field("measure") == "k1",
            "only k1 has a lower bound: the others are 0 if trainer and engine agree",
        ),
        Rule(
            written(
                "has(self.low) ? self.low <= self.high : "
                "(self.measure != 'k1' || self.high >= 1.0)",
                lambda r: (
                    r.low <= r.high if r.low is not None else r.measure != "k1" or r.high >= 1
                ),
            ),
            "low must not exceed high; without low, high must be at least 1",
            "high",
        ),
        requires(
            field("over") == "sequence_max",
            field("measure").is_in(("k2", "k3")),
            "sequence_max is for k2 and k3; veto bounds the smallest ratio of a sequence",
            "over",
        ),
        requires(
            field("measure") == "binary_kl",
            field("over") == "token",
            "binary_kl looks at single tokens",
            "over",
        ),
    )

    @property
    def lower(self) -> float:
        """The lower bound of k1's ratio."""
        return 1 / self.high if self.low is None else self.low


class OffPolicy(Model):
    """Corrections for samples that the present policy did not make."""

    method: Literal["none", "tis", "icepop"] = Field(
        "none",
        description="What becomes of pi_train / pi_rollout outside [low, high]: tis clamps it, "
        "icepop drops it.",
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="The ratio of a token; of its whole sequence (product); or the sequence's "
        "geometric mean.",
    )
    low: NonNegativeFloat = Field(0.0, description="Smallest ratio that is kept as it is.")
    high: PositiveFloat = Field(2.0, description="Largest ratio that is kept as it is.")
    old_log_probs: Literal["trainer", "rollout"] = Field(
        "trainer",
        description="Denominator of the policy ratio: log-probs of the trainer before the step, or "
        "the engine's own.",
    )
    normalize: bool = Field(
        False,
        description="Divide the weights of `method` by their mean over the optimizer step, so that "
        "they weigh 1 on "
        "average: over trained tokens; with level sequence or geometric over sequences.",
    )
    opsm_delta: NonNegativeFloat | None = Field(
        None,
        description="Off-policy sequence masking: a sequence of negative advantage is dropped "
        "where the mean of log pi_old - log pi exceeds this.",
    )

    reject: Annotated[list[Rejection], Field(max_length=4)] = Field(
        default_factory=list,
        description="Masked importance sampling: what any of these drops is not trained on.",
    )
    veto: PositiveFloat | None = Field(
        None,
        description="A sequence with a token whose pi_train / pi_rollout is below this is dropped, "
        "such as 1e-4.",
    )

    rules = (
        requires(
            field("oldLogProbs") == "rollout",
            field("method") == "none",
            "oldLogProbs: rollout corrects the gap between trainer and engine already; leave "
            "method out",
            "oldLogProbs",
        ),
        only_with(
            "level",
            field("method") != "none",
            "level has no effect without method: tis or icepop",
        ),
        only_with(
            "normalize",
            field("method") != "none",
            "normalize has no effect without method: tis or icepop",
        ),
        Rule(field("low") <= field("high"), "low must not exceed high", "low"),
    )
