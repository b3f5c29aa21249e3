"""1 if the response is the label, spaces at both ends aside, else 0."""

from __future__ import annotations

from sluice.rewards.types import RewardInput, as_text, label_text


def exact_match(sample: RewardInput) -> float:
    return float(as_text(sample.response.strip()) == label_text(sample, "exact_match").strip())
