"""1 if the label occurs in the response, else 0.

A number does not occur inside another one: 5 is not in 15, 5.2 or -5.
"""

from __future__ import annotations

import re

from sluice.rewards.types import RewardInput, label_text

_NUMBER = re.compile(r"[-+]?\d[\d.,]*")


def contains(sample: RewardInput) -> float:
    label = label_text(sample, "contains").strip()
    spellings = {label, str(sample.label).strip()}
    return float(any(_occurs(spelling, sample.response) for spelling in spellings))


def _occurs(label: str, response: str) -> bool:
    if not _NUMBER.fullmatch(label):
        return label in response
    alone = rf"(?<!\d)(?<!\d[.,])(?<!(?<!\w)-){re.escape(label)}(?![.,]?\d)"
    return bool(re.search(alone, response))
