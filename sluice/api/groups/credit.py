"""spec.algorithm.turnAdvantage, and rules of advantages where a job has seats."""

from __future__ import annotations

from pydantic import Field

from sluice.api.groups.estimators import estimators
from sluice.api.schema.base import Fraction, Model
from sluice.api.schema.rules import field, only_with, requires


class TurnAdvantage(Model):
    """An advantage for each turn: its discounted return, compared with those of the turns of the
    same place in the prompt's other episodes.
    """

    gamma: Fraction = Field(1.0, description="Discount of a reward for each turn that it is later.")


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
        field("rollout.seats").given,
        ~field("algorithm.estimator").is_in(estimators(lambda kind: kind.greedy or kind.parts)),
        "remax and gdpo know one reward of an episode, and rollout.seats has one for each seat: "
        "use another estimator",
        "algorithm.estimator",
    ),
    requires(
        field("rollout.seats").given,
        ~field("reward.group").is_true,
        "with rollout.seats a reward judges each seat for itself, and cannot have the whole group",
        "reward.group",
    ),
)
