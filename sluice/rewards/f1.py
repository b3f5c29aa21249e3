"""Word-level F1 of response and label, as in SQuAD (Rajpurkar et al. 2016): case, punctuation, articles aside."""

from __future__ import annotations

import re
import string
from collections import Counter

from sluice.rewards.types import RewardInput

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(sample: RewardInput) -> float:
    answers = sample.label if isinstance(sample.label, list) else [sample.label]
    return max((_f1(_words(sample.response), _words(str(answer))) for answer in answers), default=0.0)


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _f1(response: list[str], label: list[str]) -> float:
    shared = sum((Counter(response) & Counter(label)).values())
    if not response or not label:
        return float(response == label)
    return 2 * shared / (len(response) + len(label))
