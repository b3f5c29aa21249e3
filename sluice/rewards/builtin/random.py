"""0 or 1 by chance, whatever the response says: slime's `random`, to try a set-up
without a task.
"""

from __future__ import annotations

import random

from sluice.rewards.types import RewardInput


def by_chance(sample: RewardInput) -> float:
    return float(random.getrandbits(1))
