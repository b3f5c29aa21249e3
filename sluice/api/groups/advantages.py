"""spec.algorithm.overlong, rewardParts and turnAdvantage: from rewards to advantages."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice.api.groups.estimators import estimators
from sluice.api.schema.base import Fraction, Model, PositiveFloat, PositiveInt
from sluice.api.schema.rules import Rule, belong_together, field, only_with, requires, written


class Overlong(Model):
    """DAPO's soft overlong punishment: the last tokens before the limit cost more and more.

    The penalty lowers the rewards that the trainer sees. Filters, evaluations and the metric
    `rollout/raw_reward` do not include it.
    """

    buffer: PositiveInt = Field(
        description="Number of last tokens of rollout.sampling.maxResponseTokens that are "
        "penalized: a response with n tokens among them loses penalty * n / buffer."
    )
    penalty: PositiveFloat = Field(1.0, description="Penalty of a response that reaches the limit.")


class RewardPart(Model):
    """A part of the reward that gdpo normalizes separately."""

    name: Annotated[str, Field(min_length=1, max_length=128)] = Field(
        description="Key of a number in the reward's dictionary, or a term of reward.terms."
    )
    weight: PositiveFloat = Field(1.0, description="Weight of its advantage in the sum.")


_BY_PARTS = field("estimator").is_in(estimators(lambda kind: kind.parts))
# Rules of spec.algorithm.
OF_PARTS = (
    belong_together(
        field("rewardParts").is_set,
        _BY_PARTS,
        "gdpo needs rewardParts, and the other estimators look at the reward as a whole",
        "rewardParts",
    ),
    only_with(
        "overlong",
        ~_BY_PARTS,
        "overlong lowers the whole reward, which gdpo does not look at: use a term of type length, "
        "and name it in rewardParts",
    ),
)

# Rules of a job's spec.
OVERLONG_ACROSS_GROUPS = (
    Rule(
        written(
            "!has(self.algorithm.overlong) || self.algorithm.overlong.buffer <= "
            "self.rollout.sampling.maxResponseTokens",
            lambda s: (
                s.algorithm.overlong is None
                or s.algorithm.overlong.buffer <= s.rollout.sampling.max_response_tokens
            ),
        ),
        "the buffer is the last part of a response, and cannot exceed "
        "rollout.sampling.maxResponseTokens",
        "algorithm.overlong.buffer",
    ),
)


class TurnAdvantage(Model):
    """An advantage for each turn.

    The discounted return of a turn is compared with those of the turns at the same position in
    the other episodes of the prompt.
    """

    gamma: Fraction = Field(1.0, description="Discount of a reward per turn that it comes later.")


# Rules of spec.algorithm.
OF_TURNS = (
    only_with(
        "turnAdvantage",
        field("estimator").is_in(estimators(lambda kind: kind.turns)),
        "turnAdvantage needs grpo, dr_grpo, cispo, rloo or reinforce_plus_plus_baseline; the "
        "others look at a response as a whole, or at its tokens",
    ),
)
# Rules of a job's spec.
WITH_SEATS = (
    requires(
        field("rollout.seats").is_set,
        ~field("algorithm.estimator").is_in(estimators(lambda kind: kind.greedy or kind.parts)),
        "remax and gdpo know one reward of an episode, and rollout.seats has one for each seat: "
        "use another estimator",
        "algorithm.estimator",
    ),
    requires(
        field("rollout.seats").is_set,
        ~field("reward.group").is_true,
        "with rollout.seats a reward judges each seat for itself, and cannot have the whole group",
        "reward.group",
    ),
)
