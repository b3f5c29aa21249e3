"""Rewards: a response and its label -> a number, or named parts.

`registry.builtin` holds those that come with sluice, one file each; `custom` loads a user's
function; `judge.Judge` runs any of them under a time limit: a reward that raises, hangs or returns
nonsense fails its sample, never the run.
"""

from sluice.rewards.types import RewardError, RewardInput, RewardValue

__all__ = ["RewardError", "RewardInput", "RewardValue"]
