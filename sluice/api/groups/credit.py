"""spec.algorithm.turnAdvantage, and rules of advantages where a job has seats."""

from __future__ import annotations

from pydantic import Field

from sluice.api.groups.estimators import estimators
from sluice.api.schema.base import Fraction, Model, Rule
from sluice.api.schema.cel import listed


class TurnAdvantage(Model):
    """An advantage for each turn: its discounted return, compared with those of the turns of the
    same place in the prompt's other episodes.
    """

    gamma: Fraction = Field(1.0, description="Discount of a reward for each turn that it is later.")


OF_TURNS = (
    Rule(
        f"!has(self.turnAdvantage) || self.estimator in {listed(estimators(lambda k: k.turns))}",
        lambda a: a.turn_advantage is None or a.kind.turns,
        "turnAdvantage is of grpo, dr_grpo, cispo, rloo and reinforce_plus_plus_baseline; the "
        "others look at a response as a whole, or at its tokens",
        "turnAdvantage",
        reason="FieldValueForbidden",
    ),
)
"""Rules of spec.algorithm."""

_SEATS = "has(self.rollout.seats) && size(self.rollout.seats) > 0"
_OF_WHOLE_RESPONSES = listed(estimators(lambda kind: kind.greedy or kind.parts))
WITH_SEATS = (
    Rule(
        f"!({_SEATS}) || !(self.algorithm.estimator in {_OF_WHOLE_RESPONSES})",
        lambda s: not (s.rollout.seats and (s.algorithm.kind.greedy or s.algorithm.kind.parts)),
        "remax and gdpo know one reward of an episode, and rollout.seats has one for each seat: "
        "use another estimator",
        "algorithm.estimator",
    ),
    Rule(
        f"!({_SEATS}) || !self.?reward.group.orValue(false)",
        lambda s: not (s.rollout.seats and s.reward and s.reward.group),
        "rollout.seats: a reward judges each seat for itself, and cannot have the whole group",
        "reward.group",
    ),
)
"""Rules of the job's spec."""
