"""Rewards of the agent's answers. They see its last words as metadata `said`."""

from __future__ import annotations

from sluice.rewards import RewardInput


def right(sample: RewardInput) -> float:
    """Half for one call of the right tool, half for the right answer after it; nothing for a guess.

    Where a guess pays too a model of this size is content with it: that is learned sooner than to
    call and to read.
    """
    tool = "lookup" if str(sample.prompt).startswith("shelf") else "calculate"
    if sample.metadata.get("tool_calls") != 1 or f'"{tool}"' not in sample.response:
        return 0.0
    return 0.5 + 0.5 * exact(sample)


def exact(sample: RewardInput) -> float:
    """1 for the right answer, whichever way it was found."""
    return float(sample.metadata.get("said") == sample.label and not sample.truncated)
