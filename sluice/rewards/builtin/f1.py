"""Word-level F1 of response and label, as in SQuAD (Rajpurkar et al. 2016).

Case, punctuation and articles are ignored. As in HotpotQA and slime, yes, no and noanswer only
match themselves: "no, ..." gets no partial score for the label "yes". If the label is a list, the
best of its answers counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from sluice.rewards.types import RewardError, RewardInput, as_text, label_text

# A decimal point and a sign are part of a number: 4.2 and -42 are not 42.
_PUNCTUATION = re.compile(rf"(?!(?<=\d)\.(?=\d)|(?<![\w])-(?=\d))[{re.escape(string.punctuation)}]")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_WHOLE = (["yes"], ["no"], ["noanswer"])


def f1(sample: RewardInput) -> float:
    answers = sample.label if isinstance(sample.label, list) else [label_text(sample, "f1")]
    if not answers:
        raise RewardError("label: f1 needs at least one answer, the row has an empty list")
    words = _words(as_text(sample.response))
    return max(_f1(words, _words(as_text(answer))) for answer in answers)


def _words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", _PUNCTUATION.sub("", text.lower())).split()


def _f1(response: list[str], label: list[str]) -> float:
    if not response or not label or response in _WHOLE or label in _WHOLE:
        return float(response == label)
    shared = sum((Counter(response) & Counter(label)).values())
    return 2 * shared / (len(response) + len(label))
