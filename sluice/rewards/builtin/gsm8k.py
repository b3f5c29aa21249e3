"""GSM8K as verl scores it: `score` where the number behind `####` is the label, `flexible` where
the last number is.

The strict form also trains the format. verl looks only at the end of a response, so that a model
cannot list every number it can think of; 300 characters, as there.
"""

from __future__ import annotations

import re

from sluice.rewards.types import RewardInput, label_text

_END = 300
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]*[0-9][0-9.,]*")


def gsm8k(sample: RewardInput) -> dict[str, float]:
    label = _plain(label_text(sample, "gsm8k"))
    end = sample.response[-_END:]
    numbers = _NUMBER.findall(end)
    return {
        "score": float(said(sample.response) == label),
        "flexible": float(bool(numbers) and _plain(numbers[-1]) == label),
    }


def said(response: str) -> str | None:
    """The number behind the last `####`, in plain form; None: there is none."""
    strict = _STRICT.findall(response[-_END:])
    return _plain(strict[-1]) if strict else None


def _plain(number: str) -> str:
    """Without thousands separators, currency and the full stop that ends a sentence; the label's
    own `#### ` too.
    """
    number = number.rpartition("####")[2].strip().replace(",", "").replace("$", "").rstrip(".")
    whole, _, digits = number.partition(".")
    return whole if digits.strip("0") == "" else number
