"""Rewards of programs by what they print: metadata `printed`, of the last one."""

from __future__ import annotations

from sluice.rewards import RewardInput


def right(sample: RewardInput) -> float:
    """A fifth for a program, all for one that prints the right number."""
    return 0.2 * (sample.metadata.get("tool_calls", 0) > 0) + 0.8 * exact(sample)


def exact(sample: RewardInput) -> float:
    """1 where the last program printed the right number."""
    return float(sample.metadata.get("printed") == sample.label)
