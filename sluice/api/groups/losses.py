"""spec.algorithm.loss: the policy losses, and the settings that belong to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model, NonNegativeFloat, PositiveFloat, Rule

PolicyLossName = Literal[
    "clip",
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
DUAL_CLIPPED = ("clip", "gspo", "dppo_tv", "dppo_kl")
Share = Annotated[float, Field(gt=0, le=1)]


class Clip(Model):
    """Bounds of the policy ratio."""

    low: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2, description="Ratios below 1 - low are clipped."
    )
    high: NonNegativeFloat | None = Field(
        None, description="Ratios above 1 + high are clipped. Default: low."
    )
    dual: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Dual clip c for negative advantages."
    )

    @property
    def highest(self) -> float:
        """The upper bound, less 1."""
        return self.low if self.high is None else self.high


class Gate(Model):
    """Steepness of sapo's gate; the larger, the sooner a token that moves away from ratio 1 stops
    to count.
    """

    positive: PositiveFloat = Field(1.0, description="For positive advantages.")
    negative: PositiveFloat = Field(1.05, description="For negative advantages.")


class ClipCov(Model):
    """Which tokens the loss clip_cov leaves out, by their covariance: (log pi - mean) * (advantage
    - mean).
    """

    ratio: Share = Field(
        2e-4,
        description="Share of an optimizer step's trained tokens that is left out; at least 1.",
    )
    lower: float = Field(
        1.0, description="They are drawn from the tokens whose covariance is above this,"
    )
    upper: float = Field(5.0, description="and below this.")

    rules = (
        Rule(
            "self.lower < self.upper",
            lambda c: c.lower < c.upper,
            "lower must be less than upper: no token lies between them",
            "lower",
        ),
    )


class KLCov(Model):
    """Which tokens the loss kl_cov holds back, by their covariance:
    (log pi - mean) * (advantage - mean).
    """

    ratio: Share = Field(
        2e-4, description="Share of an optimizer step's trained tokens, the largest; at least 1."
    )
    ppo_kl_coef: NonNegativeFloat = Field(
        1.0, description="Weight of abs(log pi - log pi_old) at these tokens."
    )


def _belongs(field: str, attribute: str, loss: str) -> Rule:
    return Rule(
        f"!has(self.{field}) || self.?loss.orValue('') == '{loss}' || has(self.lossFunction)",
        lambda a: (
            getattr(a, attribute) is None or a.policy_loss == loss or a.loss_function is not None
        ),
        f"only the loss {loss} looks at it",
        field,
        reason="FieldValueForbidden",
    )


BY_COVARIANCE = (_belongs("clipCov", "clip_cov", "clip_cov"), _belongs("klCov", "kl_cov", "kl_cov"))
"""Rules of spec.algorithm."""
