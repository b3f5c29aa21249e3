"""Rewards of the agent's answers. They see metadata `said`, its last words, and `passage`, what its
search gave.
"""

from __future__ import annotations

import re

from sluice.rewards import RewardInput


def right(sample: RewardInput) -> float:
    """Half for a search that finds the passage, half for the right answer after it; nothing for a
    guess.

    Where a guess pays too a model of this size is content with it: that is learned sooner than to
    search and to read.
    """
    words = set(re.findall(r"\w+", str(sample.metadata.get("passage", ""))))
    if not words.issuperset(str(sample.prompt).split()):
        return 0.0
    return 0.5 + 0.5 * exact(sample)


def exact(sample: RewardInput) -> float:
    """1 for the right answer, whichever way it was found."""
    return float(sample.metadata.get("said") == sample.label and not sample.truncated)
