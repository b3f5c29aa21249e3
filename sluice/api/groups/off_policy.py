"""spec.algorithm.offPolicy: what becomes of samples that the present policy did not make."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model, NonNegativeFloat, PositiveFloat
from sluice.api.schema.rules import Rule, field, only_with, requires, written

Divergence = Literal["k1", "k2", "k3", "binary_kl"]
Scope = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


class Rejection(Model):
    """Tokens or sequences that are left out because trainer and engine disagree too much."""

    measure: Divergence = Field(
        "k1",
        description="Measure of d = log pi_train - log pi_rollout. k1: d, with bounds on the "
        "ratio exp(d); k2: d^2 / 2; k3: exp(d) - 1 - d; binary_kl: KL of this token against "
        "all others, the larger of both directions.",
    )
    over: Scope = Field(
        "token",
        description="What is measured: each token, or the sum, mean or largest of the tokens "
        "of its sequence.",
    )
    low: PositiveFloat | None = Field(
        None, description="Smallest ratio that is kept, with measure k1. Default: 1 / high."
    )
    high: PositiveFloat = Field(
        description="Largest value that is kept; with measure k1 the largest ratio."
    )

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


_WEIGHTED = field("method").is_in(("tis", "icepop"))


class OffPolicy(Model):
    """Corrections for samples that the current policy did not generate."""

    method: Literal["none", "tis", "icepop"] | None = Field(
        None,
        description="Treatment of a ratio pi_train / pi_rollout outside [low, high]. tis "
        "clamps it, icepop drops its tokens. Default: tis with rollout.precision or "
        "rollout.kvCacheDtype in few bits, unless oldLogProbs is rollout; otherwise none.",
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="Which ratio is used: that of the token, of its whole sequence "
        "(product), or the geometric mean of the sequence.",
    )
    low: NonNegativeFloat = Field(0.0, description="Smallest ratio that is not changed.")
    high: PositiveFloat = Field(2.0, description="Largest ratio that is not changed.")
    old_log_probs: Literal["trainer", "rollout"] = Field(
        "trainer",
        description="Denominator of the policy ratio: log-probs of the trainer before the "
        "step, or those of the engine.",
    )
    normalize: bool = Field(
        False,
        description="Divide the weights of `method` by their mean over the optimizer step, "
        "so that they average 1: over trained tokens, or over sequences with level sequence "
        "or geometric.",
    )
    opsm_delta: NonNegativeFloat | None = Field(
        None,
        description="Off-policy sequence masking: leave out sequences with a negative "
        "advantage if the mean of log pi_old - log pi exceeds this. Default: off.",
    )

    reject: Annotated[list[Rejection], Field(max_length=4)] = Field(
        default_factory=list,
        description="Masked importance sampling: tokens and sequences that any entry rejects "
        "are not trained on.",
    )
    veto: PositiveFloat | None = Field(
        None,
        description="Drop a sequence with a token whose pi_train / pi_rollout is below this, "
        "such as 1e-4.",
    )

    rules = (
        requires(
            field("oldLogProbs") == "rollout",
            ~_WEIGHTED,
            "oldLogProbs: rollout corrects the gap between trainer and engine already; leave "
            "method out",
            "oldLogProbs",
        ),
        only_with(
            "level",
            _WEIGHTED,
            "level has no effect without method: tis or icepop",
        ),
        only_with(
            "normalize",
            _WEIGHTED,
            "normalize has no effect without method: tis or icepop",
        ),
        Rule(field("low") <= field("high"), "low must not exceed high", "low"),
    )

    @property
    def weighted(self) -> bool:
        """True if tokens are weighted by pi_train / pi_rollout."""
        return self.method in ("tis", "icepop")
