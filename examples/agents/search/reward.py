"""Reward the agent's answers.

The metadata has `said`, the agent's last words, and `passage`, the result of its search.
"""

from __future__ import annotations

import re

from sluice.rewards import RewardInput


def right(sample: RewardInput) -> float:
    """Pay half for a search that finds the passage, and half for the right answer after it.

    A guess is not paid: a small model learns to guess sooner than to search and to read.
    """
    words = set(re.findall(r"\w+", str(sample.metadata.get("passage", ""))))
    if not words.issuperset(str(sample.prompt).split()):
        return 0.0
    return 0.5 + 0.5 * exact(sample)


def exact(sample: RewardInput) -> float:
    """Return 1 for the right answer, however it was found."""
    return float(sample.metadata.get("said") == sample.label and not sample.truncated)
