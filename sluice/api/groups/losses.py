"""spec.algorithm.loss: the loss, its type and the settings that this type has.

The object is flat: `type`, then the settings of that type. Kubernetes' structural schemas cannot
choose between objects, and a member per type (`loss: {ppo: {clip: {...}}}`) would repeat `clip` in
seven of them and make every manifest a level deeper. Most jobs leave `type` out and write
`loss: {clip: {high: 0.28}}`.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from sluice.api.schema.base import Model, NonNegativeFloat, PositiveFloat
from sluice.api.schema.paths import UserFunction
from sluice.api.schema.rules import Rule, any_set, at_most_one_of, field, only_with, requires

PolicyLossName = Literal[
    "ppo",
    "gspo",
    "cispo",
    "reinforce",
    "geo_mean",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
]
LossType = Literal[
    "ppo",
    "gspo",
    "cispo",
    "reinforce",
    "geo_mean",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "sft",
]
SFT: LossType = "sft"
POLICY_LOSSES: tuple[PolicyLossName, ...] = get_args(PolicyLossName)
CLIPPED = ("ppo", "gspo", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "clip_cov")
DUAL_CLIPPED = ("ppo", "gspo", "dppo_tv", "dppo_kl")
BY_COVARIANCE = ("clip_cov", "kl_cov")
Share = Annotated[float, Field(gt=0, le=1)]


class Clip(Model):
    """Bounds of the policy ratio pi / pi_old."""

    low: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2, description="Ratios below 1 - low are clipped."
    )
    high: NonNegativeFloat | None = Field(
        None, description="Ratios above 1 + high are clipped. Default: low."
    )
    dual: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="Dual clip c. Types ppo and gspo: the loss of a token with a negative "
        "advantage A is at most -c * A. Types dppo_tv and dppo_kl: the ratio is at most c. "
        "Default: no bound.",
    )

    @property
    def highest(self) -> float:
        """The upper bound, less 1."""
        return self.low if self.high is None else self.high


class Gate(Model):
    """Steepness of sapo's gate.

    The larger it is, the sooner a token that moves away from ratio 1 stops to count.
    """

    positive: PositiveFloat = Field(1.0, description="For tokens with a positive advantage.")
    negative: PositiveFloat = Field(1.05, description="For tokens with a negative advantage.")


class Covariance(Model):
    """Tokens that clip_cov leaves out or kl_cov holds back.

    They are chosen by covariance: (log pi - mean) * (advantage - mean).
    """

    ratio: Share = Field(
        2e-4,
        description="Fraction of the trained tokens of an optimizer step that is chosen, at least "
        "one token.",
    )
    lower: float = Field(
        1.0, description="clip_cov: tokens are drawn from those with a covariance above this."
    )
    upper: float = Field(
        5.0, description="clip_cov: tokens are drawn from those with a covariance below this."
    )

    rules = (
        Rule(
            field("lower") < field("upper"),
            "lower must be less than upper: no token lies between them",
            "lower",
        ),
    )


class Loss(Model):
    """Loss of a token.

    Each type has its own settings, and those of other types are refused. An own function may
    read all of them.
    """

    type: LossType | None = Field(
        None,
        description="ppo: PPO's clipped surrogate. gspo: the same on the ratio of the sequence. "
        "cispo: a clipped weight. reinforce: -A log pi. geo_mean: GMPO. sapo: a soft gate in place "
        "of the clip. dppo_tv, dppo_kl: only tokens whose probability moved less than clip.low and "
        "clip.high, by total variation or KL. clip_cov, kl_cov: tokens with a large covariance of "
        "log-prob and advantage are left out, or held back. sft: supervised fine-tuning on given "
        "answers, -log pi (docs/data.md describes the rows). Default: gspo and cispo for the "
        "estimators of that name, ppo for the others.",
    )
    function: UserFunction | None = Field(
        None, description="Own policy loss, a Python function by dotted path, in place of `type`."
    )
    clip: Clip = Field(default_factory=Clip)
    gate: Gate | None = Field(None, description="Type sapo: its gate.")
    covariance: Covariance | None = Field(
        None, description="Types clip_cov and kl_cov: the tokens that are chosen."
    )

    rules = (
        at_most_one_of("type", "function", message="type and function cannot both be set"),
        only_with(
            "clip",
            ~field("type").is_set | field("type").is_in(CLIPPED),
            f"clip needs one of the types {', '.join(CLIPPED)}; leave it out",
        ),
        only_with(
            "gate",
            (field("type") == "sapo") | field("function").is_set,
            "gate needs type: sapo; leave it out",
        ),
        only_with(
            "covariance",
            field("type").is_in(BY_COVARIANCE) | field("function").is_set,
            "covariance needs type: clip_cov or kl_cov; leave it out",
        ),
        requires(
            field("type") == "kl_cov",
            ~any_set("covariance.lower", "covariance.upper"),
            "covariance.lower and covariance.upper need type: clip_cov; kl_cov takes the largest",
            "covariance",
            reason="FieldValueForbidden",
        ),
    )
