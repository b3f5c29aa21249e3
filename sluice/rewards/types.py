"""What goes into a reward function and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sluice.sample import Messages

RewardValue = float | int | bool | dict[str, Any]
"""A number, or a dictionary of named numbers of which `reward.key` picks the reward."""


class RewardError(Exception):
    """The reward of one sample could not be had. The message says why, for people."""


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What a reward function sees of a sample."""

    prompt: str | Messages
    response: str
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    truncated: bool = False


RewardFunction = Callable[[RewardInput], RewardValue]


def read_value(value: Any, key: str | None) -> tuple[float, dict[str, float]]:
    """(reward, parts) of what a reward function returned. Raises RewardError on anything that is no number."""
    if isinstance(value, dict):
        parts = {str(k): _number(v, f"reward part {k!r}") for k, v in value.items() if isinstance(v, int | float)}
        if key is None:
            raise RewardError(f"the reward is a dictionary ({', '.join(map(str, value))}): set reward.key")
        if key not in parts:
            raise RewardError(f"the reward has no number {key!r}; it has {', '.join(map(str, value)) or 'nothing'}")
        return parts[key], parts
    return _number(value, "the reward"), {}


def _number(value: Any, what: str) -> float:
    if not isinstance(value, int | float) and not hasattr(value, "__float__"):
        raise RewardError(f"{what} is {type(value).__name__} {value!r}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}, expected a finite number")
    return number
