"""The reward of episodes that the environment gives none."""

from __future__ import annotations

from sluice.rewards import RewardInput


def nothing(sample: RewardInput) -> float:
    """Nothing, for a conversation that was full before the model had answered."""
    return 0.0
