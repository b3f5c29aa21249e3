"""spec.algorithm.overlong: what the length of a response takes off its reward."""

from __future__ import annotations

from pydantic import Field

from sluice.api.base import Model, PositiveFloat, PositiveInt, Rule


class Overlong(Model):
    """DAPO's soft overlong punishment: the last tokens before the limit cost more and more.

    It comes off the rewards that the trainer sees. Filters, evaluations and the reward that is
    shown (`rollout/raw_reward`) are without it.
    """

    buffer: PositiveInt = Field(
        description="The last so many tokens of rollout.sampling.maxResponseTokens: a response "
        "that reaches into them loses penalty * (its tokens there) / buffer."
    )
    penalty: PositiveFloat = Field(
        1.0, description="Taken off the reward of a response that is as long as it may be."
    )


OVERLONG_ACROSS_GROUPS = (
    Rule(
        "!has(self.algorithm.overlong) || self.algorithm.overlong.buffer <= "
        "self.rollout.sampling.maxResponseTokens",
        lambda s: (
            s.algorithm.overlong is None
            or s.algorithm.overlong.buffer <= s.rollout.sampling.max_response_tokens
        ),
        "the buffer is the last part of a response, and cannot exceed "
        "rollout.sampling.maxResponseTokens",
        "algorithm.overlong.buffer",
    ),
)
"""Rules of the job's spec."""
