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
    "dpo",
    "ipo",
    "kto",
    "orpo",
    "simpo",
    "reward_model",
]
PreferenceLoss = Literal["dpo", "ipo", "kto", "orpo", "simpo", "reward_model"]
SFT: LossType = "sft"
PREFERENCE_LOSSES: tuple[PreferenceLoss, ...] = get_args(PreferenceLoss)
# Losses that learn from rows of a data set, without generated samples.
OFFLINE: tuple[LossType, ...] = (SFT, *PREFERENCE_LOSSES)
# Preference losses that compare the policy with the reference.
WITH_REFERENCE: tuple[PreferenceLoss, ...] = ("dpo", "ipo", "kto")
# Preference losses with a `beta`.
_SCALED: tuple[PreferenceLoss, ...] = ("dpo", "ipo", "kto", "orpo", "simpo")
# Settings of `preference` that not all preference losses have.
_TYPES_WITH: dict[str, tuple[PreferenceLoss, ...]] = {
    "beta": _SCALED,
    "labelSmoothing": ("dpo", "simpo"),
    "lengthNormalized": ("dpo", "ipo"),
    "margin": ("simpo",),
    "desirableWeight": ("kto",),
    "undesirableWeight": ("kto",),
    "centering": ("reward_model",),
}
# Defaults of `preference.beta` by loss: the papers'.
_BETAS: dict[PreferenceLoss, float] = {"simpo": 2.0}
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


class Preference(Model):
    """Settings of the losses of preferences."""

    beta: PositiveFloat | None = Field(
        None,
        description="dpo, ipo, kto: how strongly the reference holds the policy. simpo: scale of "
        "the rewards. orpo: weight of the odds ratio. Default: 0.1; 2.0 for simpo.",
    )
    # Not lt=0.5: API servers compare a whole number, such as 0, with the whole part of a bound.
    label_smoothing: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.0,
        description="dpo, simpo: share of pairs whose preference is taken to be the wrong way "
        "round.",
    )
    length_normalized: bool | None = Field(
        None,
        description="dpo, ipo: divide the log-prob of an answer by its tokens. Default: true for "
        "ipo, false for dpo.",
    )
    margin: NonNegativeFloat | None = Field(
        None,
        description="simpo: least difference of the rewards of a pair (gamma). Default: 0.5.",
    )
    desirable_weight: NonNegativeFloat = Field(1.0, description="kto: weight of desirable answers.")
    undesirable_weight: NonNegativeFloat = Field(
        1.0, description="kto: weight of undesirable answers."
    )
    centering: NonNegativeFloat = Field(
        0.0,
        description="reward_model: weight of the squared sum of a pair's rewards, which keeps "
        "rewards near 0.",
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
        "answers, -log pi (docs/data.md describes the rows). dpo, ipo, orpo, simpo: learn from "
        "pairs of a chosen and a rejected answer; kto: from answers that are desirable or not. "
        "reward_model: train a reward model on pairs. Default: gspo and cispo for the "
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

    preference: Preference | None = Field(
        None, description="Types dpo, ipo, kto, orpo, simpo and reward_model: their settings."
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
        only_with(
            "preference",
            field("type").is_in(PREFERENCE_LOSSES),
            f"preference needs one of the types {', '.join(PREFERENCE_LOSSES)}; leave it out",
        ),
        *(
            only_with(
                f"preference.{name}",
                field("type").is_in(types),
                f"{name} needs type: {' or '.join(types)}; leave it out",
            )
            for name, types in _TYPES_WITH.items()
        ),
    )

    @property
    def preferences(self) -> Preference:
        """The settings of a preference loss, with the defaults of its type."""
        assert self.type in PREFERENCE_LOSSES
        settings = self.preference or Preference()
        given = settings.model_dump(exclude_none=True)
        defaults = {
            "beta": _BETAS.get(self.type, 0.1),
            "length_normalized": self.type not in ("dpo", "kto"),
            "margin": 0.5,
        }
        return Preference.model_validate(defaults | given)
