"""GSM8K as verl scores it.

`score` is 1 if the number after `####` is the label, `flexible` if the last number is. The strict
form also trains the format. Only the last 300 characters are read, as in verl, so that a model
cannot list every number that it can think of. The line after `####` holds the number and perhaps
its unit. More numbers, or words that change the number (million, or), make it no answer.
"""

from __future__ import annotations

import re

from sluice.rewards.builtin.extraction import after_thinking
from sluice.rewards.builtin.notation import changes_value
from sluice.rewards.types import RewardInput, label_text

_END = 300
_STRICT = re.compile(r"#### \$?(-?[0-9.,]+)([^\n]*)")
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NUMBER = re.compile(r"-?[0-9.,]*[0-9][0-9.,]*")


def gsm8k(sample: RewardInput) -> dict[str, float]:
    label = _plain(label_text(sample, "gsm8k"))
    end = after_thinking(sample.response)[-_END:]
    numbers = _NUMBER.findall(end)
    return {
        "score": float(read_answer(sample.response) == label),
        "flexible": float(bool(numbers) and _plain(numbers[-1]) == label),
    }


def read_answer(response: str) -> str | None:
    """Return the normalised number after the last `####`; None if there is no such number."""
    strict = _STRICT.findall(after_thinking(response)[-_END:])
    if not strict:
        return None
    number, rest = strict[-1]
    return None if re.search(r"\d", rest) or changes_value(rest) else _plain(number)


def _plain(number: str) -> str:
    """Strip thousands separators, currency, a final full stop, and the label's `#### `."""
    number = number.rpartition("####")[2].strip().replace("$", "").rstrip(".,")
    number = number.replace(",", "") if _GROUPED.fullmatch(number) else number
    whole, _, digits = number.partition(".")
    digits = digits.rstrip("0")
    return f"{whole or '0'}.{digits}" if digits else whole
