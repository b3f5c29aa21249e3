"""spec.algorithm.distillation: a teacher scores the tokens that the policy, its student, generates."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice.api.base import Model, PositiveFloat, Rule
from sluice.api.base import Path as PathField


class Teacher(Model):
    """The model that is learned from. Its tokenizer must be the student's. Exactly one of `path` and `url`."""

    path: PathField | None = Field(
        None,
        description="Hugging Face checkpoint that the trainer scores with, beside the policy and under its parallel "
        "layout; of any shape. With model.volume: relative to that volume's root.",
    )
    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)] | None = Field(
        None,
        description="SGLang server of your own, without path, that rollout workers ask once a response is finished.",
    )
    timeout_seconds: PositiveFloat = Field(
        60.0,
        description="`url`: of one request; failed requests are repeated with back-off, for at most 4 times as long in "
        "all. Then the sample fails.",
    )

    rules = (
        Rule(
            "has(self.path) != has(self.url)",
            lambda t: (t.path is None) != (t.url is None),
            "exactly one of path (a checkpoint, scored by the trainer) and url (an SGLang server) must be set",
        ),
    )


class Distillation(Model):
    """On-policy distillation: coef * (log pi_teacher - log pi_old) is added to the advantage of each token."""

    coef: PositiveFloat = Field(
        1.0, description="Weight beside the estimator's advantage, which without a reward is 0."
    )
    teacher: Teacher


_DISTILLS = "(has(self.algorithm) && has(self.algorithm.distillation))"
_TEMPERATURE = (
    "(has(self.rollout) && has(self.rollout.sampling) && has(self.rollout.sampling.temperature) ? "
    "self.rollout.sampling.temperature : 1.0)"
)

DISTILLATION_ACROSS_GROUPS = (
    Rule(
        f"!({_DISTILLS} && has(self.algorithm.distillation.teacher.url)) || {_TEMPERATURE} == 1.0",
        lambda s: (
            s.algorithm.distillation is None
            or s.algorithm.distillation.teacher.url is None
            or s.rollout.sampling.temperature == 1
        ),
        "SGLang scores given tokens at temperature 1 whatever it is told, and the student's log-probs are those at "
        "rollout.sampling.temperature: set that to 1, or let the trainer score (teacher.path)",
        "algorithm.distillation.teacher.url",
    ),
    Rule(
        "has(self.reward) || !(has(self.algorithm) && has(self.algorithm.estimator) && "
        "self.algorithm.estimator in ['remax', 'ppo'])",
        lambda s: s.reward is not None or s.algorithm.estimator not in ("remax", "ppo"),
        "without spec.reward there is nothing that this estimator's baseline or critic could predict; leave it out: "
        "the teacher alone gives the advantage",
        "algorithm.estimator",
    ),
    Rule(
        "has(self.reward) || !(has(self.rollout) && has(self.rollout.dynamicFilter) && "
        "self.rollout.dynamicFilter == 'nonzero_std')",
        lambda s: s.reward is not None or s.rollout.dynamic_filter != "nonzero_std",
        "without spec.reward all rewards of a prompt are equal, and nonzero_std would drop every group",
        "rollout.dynamicFilter",
    ),
)
"""Rules of the job's spec that are about distillation, or about jobs that have no reward."""
