"""Input and output of reward functions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from numbers import Integral, Real
from typing import Any

from sluice import input_checks
from sluice.images.image import Image
from sluice.input_checks import InputError, is_number, without_surrogates
from sluice.input_checks import shown as shown
from sluice.samples.sample import PREDICTION, Messages

# A number, or a dictionary of named numbers of which one, `score` or what `reward.key` names, is
# the reward.
RewardValue = float | int | bool | dict[str, Any]

# (the reward, all named parts of it).
Judgement = tuple[float, dict[str, float]]

DEFAULT_KEY = "score"
_HASH_BYTES = 6
_MOST_PARTS = 64
_LONGEST_NAME = 128
_LONGEST_MESSAGE = 2000
_LONGEST_DETAILS = 20_000
_LARGEST_EXPONENT = 400
_SCIENTIFIC = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}\s*")


class RewardError(Exception):
    """A sample has no reward.

    Parameters
    ----------
    message
        The cause, for people.
    reason
        A short word for metrics.
    details
        Traceback of the function that raised, for the log.

    """

    def __init__(self, message: str, reason: str = "refused", details: str = "") -> None:
        super().__init__(without_surrogates(message)[:_LONGEST_MESSAGE])
        self.reason = reason
        self.details = without_surrogates(details)[-_LONGEST_DETAILS:]


@dataclass(frozen=True, slots=True)
class RewardInput:
    """A sample as reward functions see it. Field names are those of slime's Sample.

    `images` are those of the prompt, in their order; functions in their own process get copies.
    """

    prompt: str | Messages
    response: str
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    truncated: bool = False
    images: list[Image] = field(default_factory=list)


RewardFunction = Callable[[RewardInput], RewardValue]


def read_value(value: Any, key: str | None) -> Judgement:
    """Return the reward and its parts from the return value of a reward function.

    Raises RewardError unless it is a number that a trainer can compute with.
    """
    try:
        return _read(value, key)
    except InputError as error:
        raise RewardError(str(error)) from error


def _read(value: Any, key: str | None) -> Judgement:
    if not isinstance(value, dict):
        return input_checks.reward(value), {}
    if len(value) > _MOST_PARTS or any(len(str(name)) > _LONGEST_NAME for name in value):
        raise RewardError(
            f"the reward is a dictionary of {len(value)} entries, expected at most {_MOST_PARTS} "
            "with short names"
        )
    parts = {
        str(k): input_checks.float32(v, f"reward part {shown(k)}")
        for k, v in value.items()
        if is_number(v)
    }
    for name in parts:
        input_checks.check_text(name, "the name of a reward part")
    if isinstance(said := value.get(PREDICTION), str):
        parts[PREDICTION] = answer_number(said)
    reward_key = key or DEFAULT_KEY
    if reward_key in parts:
        return input_checks.reward(parts[reward_key]), parts
    names = ", ".join(map(str, value)) or "nothing"
    if key is None:
        raise RewardError(
            f"the reward is a dictionary without {DEFAULT_KEY!r} ({names}): set reward.key"
        )
    raise RewardError(f"the reward has no number {key!r}; it has {names}")


def answer_number(answer: str) -> float:
    """Return 48 bits of a hash, which a float holds exactly; equal answers get equal numbers."""
    digest = hashlib.blake2b(answer.encode(errors="replace"), digest_size=_HASH_BYTES).digest()
    return float(int.from_bytes(digest))


def late(seconds: float) -> str:
    """Return the error text of a reward that exceeds its time limit."""
    return f"no reward after {seconds:g} s (reward.timeoutSeconds)"


def label_text(sample: RewardInput, reward: str) -> str:
    """Return a row's label as text (`as_text`), for a reward that requires it.

    Raises RewardError if there is no label.
    """
    if sample.label is None or isinstance(sample.label, dict | list):
        raise RewardError(
            f"label: {reward} needs a text or a number, the row has {shown(sample.label)}"
        )
    return as_text(sample.label)


def as_text(value: Any) -> str:
    """Return a label, or a value to compare with it, as a person would write it.

    Parquet returns a column of integers with a null as floats, and JSON may use exponents: 7.0
    becomes "7", 1e-05 "0.00001", "1.5e3" "1500". Other texts stay.
    """
    is_number = isinstance(value, Real | Decimal) and not isinstance(value, Integral)
    if not is_number and not (isinstance(value, str) and _SCIENTIFIC.fullmatch(value)):
        return str(value)
    try:
        number = Decimal(str(value).strip())
    except InvalidOperation:  # a Fraction
        return str(value)
    if not number.is_finite() or abs(number.adjusted()) > _LARGEST_EXPONENT:
        return str(value)
    digits = f"{number:f}"
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits == "-0" else digits
