"""Rewards: turn a response and its label into a number, or named parts.

`registry` lists the built-in rewards, one file each. `judging.judge.Judge` runs a built-in reward,
a user's function, a remote reward or a reward model with limits. A reward that raises, hangs or
returns nonsense fails its sample, never the run.
"""

from sluice.rewards.types import RewardError, RewardInput, RewardValue

__all__ = ["RewardError", "RewardInput", "RewardValue"]
