"""Random reward, 0 or 1, whatever the response (slime's `random`): to try a set-up."""

from __future__ import annotations

import random

from sluice.rewards.types import RewardInput


def by_chance(sample: RewardInput) -> float:
    return float(random.getrandbits(1))
