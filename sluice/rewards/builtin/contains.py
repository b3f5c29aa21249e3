"""1 where the label stands somewhere in the response; else 0."""

from __future__ import annotations

from sluice.rewards.types import RewardInput, label_text


def contains(sample: RewardInput) -> float:
    return float(label_text(sample, "contains").strip() in sample.response)
