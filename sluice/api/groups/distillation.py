"""spec.algorithm.distillation: a teacher scores the tokens that the policy generates."""

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
    """Model that the policy learns from. Exactly one of `path` and `url`.

    Its tokenizer must be that of the policy.
    """

    path: ModelPath | None = Field(
        None,
        description="Hugging Face checkpoint of any shape. The trainer scores with it, under "
        "the parallel layout of the policy. With model.volume: relative to the root of that "
        "volume.",
    )
    url: Url | None = Field(
        None,
        description="Address of an SGLang server, without path. Rollout workers ask it when "
        "a response is finished.",
    )
    timeout_seconds: PositiveFloat = Field(
        60.0,
        description="`url`: timeout of one request in seconds. Failed requests are repeated "
        "with back-off, for at most 4 times as long in all. Then the sample fails.",
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
    """Teacher for the rows of one data source."""

    data_source: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        description="Value of `data_source` in the rows."
    )
    url: Url = Field(description="Address of its SGLang server, as in teacher.url.")


class Distillation(Model):
    """On-policy distillation.

    With divergence token, coef * (log pi_teacher - log pi_old) is added to the advantage of
    each token. With another divergence, coef * the divergence of student and teacher at each
    token is added to the loss.
    """

    coef: PositiveFloat = Field(
        1.0,
        description="Weight relative to the estimator's advantage, which is 0 without a reward.",
    )
    divergence: Literal["token", "reverse_kl", "forward_kl", "jsd"] = Field(
        "token",
        description="token: reverse KL of the sampled token, as an advantage. The others are "
        "losses over the whole vocabulary and need teacher.path. reverse_kl: KL(student || "
        "teacher); forward_kl: KL(teacher || student); jsd: generalized Jensen-Shannon "
        "(GKD).",
    )
    beta: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Mixture of jsd: near 0 it acts as forward_kl, near 1 as reverse_kl. "
        "Default: 0.5.",
    )
    teacher: TeacherSpec
    teachers: Annotated[list[SourceTeacher], Field(max_length=16), Unique("dataSource")] = Field(
        default_factory=list,
        description="Teachers for the rows of some data sources. `teacher` scores all other rows.",
    )

    rules = (
        requires(
            field("divergence") != "token",
            field("teacher.path").is_set,
            "a divergence over the whole vocabulary needs a teacher that the trainer scores with: "
            "teacher.path",
            "divergence",
        ),
        only_with("beta", field("divergence") == "jsd", "only the divergence jsd has a beta"),
        requires(
            field("teachers").is_set,
            field("teacher.url").is_set,
            "teachers are SGLang servers, and so must be the one for all other rows: teacher.url",
            "teachers",
        ),
    )

    @property
    def whole(self) -> WholeVocabulary | None:
        """Divergence over the whole vocabulary; None for that of the sampled token."""
        return None if self.divergence == "token" else self.divergence

    @property
    def mixture(self) -> float:
        """Weight of the teacher in the mixture of jsd."""
        return 0.5 if self.beta is None else self.beta


# Rules of a job's spec about distillation, and about jobs without a reward.
DISTILLATION_ACROSS_GROUPS = (
    requires(
        field("algorithm.distillation.teacher.url").is_set,
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
