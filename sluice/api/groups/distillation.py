"""spec.algorithm.distillation: a teacher scores the tokens that the policy,
its student, generates.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.groups.environment import REWARDED
from sluice.api.groups.estimators import estimators
from sluice.api.schema.base import Model, PositiveFloat, Unique
from sluice.api.schema.paths import ModelPath
from sluice.api.schema.rules import exactly_one, field, only_with, requires

WholeVocabulary = Literal["reverse_kl", "forward_kl", "jsd"]
Url = Annotated[str, Field(pattern=r"^https?://", max_length=2048)]


class TeacherSpec(Model):
    """The model that is learned from. Its tokenizer must be the student's. Exactly one of `path`
    and `url`.
    """

    path: ModelPath | None = Field(
        None,
        description="Hugging Face checkpoint that the trainer scores with, beside the policy and "
        "under its parallel "
        "layout; of any shape. With model.volume: relative to that volume's root.",
    )
    url: Url | None = Field(
        None,
        description="SGLang server of your own, without path, that rollout workers ask once a "
        "response is finished.",
    )
    timeout_seconds: PositiveFloat = Field(
        60.0,
        description="`url`: of one request; failed requests are repeated with back-off, for at "
        "most 4 times as long in all. Then the sample fails.",
    )

    rules = (
        exactly_one(
            "path",
            "url",
            message="exactly one of path (a checkpoint, scored by the trainer) and url (an SGLang "
            "server) must be set",
        ),
    )


class SourceTeacher(Model):
    """A teacher for rows of one data source."""

    data_source: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        description="The rows' `data_source`."
    )
    url: Url = Field(description="Its SGLang server, as in teacher.url.")


class Distillation(Model):
    """On-policy distillation: coef * (log pi_teacher - log pi_old) is added to the advantage of
    each token.

    Or, with another divergence than token, coef * the divergence of student and teacher at each
    token to the loss.
    """

    coef: PositiveFloat = Field(
        1.0, description="Weight beside the estimator's advantage, which without a reward is 0."
    )
    divergence: Literal["token", "reverse_kl", "forward_kl", "jsd"] = Field(
        "token",
        description="token: reverse KL by the sampled token, as an advantage. The others are "
        "losses over the whole vocabulary, with teacher.path: reverse_kl: KL(student || teacher); "
        "forward_kl: KL(teacher || student); jsd: generalized Jensen-Shannon (GKD).",
    )
    beta: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Of jsd; near 0 it acts as forward_kl, near 1 as reverse_kl. Default: 0.5.",
    )
    teacher: TeacherSpec
    teachers: Annotated[list[SourceTeacher], Field(max_length=16), Unique("dataSource")] = Field(
        default_factory=list,
        description="Teachers for rows of some data sources, each in place of `teacher`, which has "
        "all others.",
    )

    rules = (
        requires(
            field("divergence") != "token",
            field("teacher.path").given,
            "a divergence over the whole vocabulary needs a teacher that the trainer scores with: "
            "teacher.path",
            "divergence",
        ),
        only_with("beta", field("divergence") == "jsd", "only the divergence jsd has a beta"),
        requires(
            field("teachers").given,
            field("teacher.url").given,
            "teachers are SGLang servers, and so must be the one for all other rows: teacher.url",
            "teachers",
        ),
    )

    @property
    def whole(self) -> WholeVocabulary | None:
        """The divergence over the whole vocabulary; None: that of the sampled token."""
        return None if self.divergence == "token" else self.divergence

    @property
    def mixture(self) -> float:
        """The teacher's part in jsd's mixture."""
        return 0.5 if self.beta is None else self.beta


# Rules of a job's spec about distillation, and about jobs without a reward.
DISTILLATION_ACROSS_GROUPS = (
    requires(
        field("algorithm.distillation.teacher.url").given,
        field("rollout.sampling.temperature") == 1.0,
        "SGLang scores given tokens at temperature 1 always, and the student's log-probs are those "
        "at rollout.sampling.temperature: set that to 1, or let the trainer score (teacher.path)",
        "algorithm.distillation.teacher.url",
    ),
    requires(
        field("algorithm.estimator").is_in(estimators(lambda kind: kind.greedy or kind.critic)),
        REWARDED,
        "without spec.reward this estimator's baseline or critic has nothing to predict; leave "
        "the estimator out: the teacher alone gives the advantage",
        "algorithm.estimator",
    ),
    requires(
        field("rollout.dynamicFilter") == "nonzero_std",
        REWARDED,
        "without spec.reward all rewards of a prompt are equal, and nonzero_std would drop every "
        "group",
        "rollout.dynamicFilter",
    ),
)
