"""1 where the label stands somewhere in the response; else 0."""

from __future__ import annotations

from sluice.rewards.types import RewardInput


def contains(sample: RewardInput) -> float:
    return float(str(sample.label).strip() in sample.response)
