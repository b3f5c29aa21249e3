"""Steps of a run as the rules of its health read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Rule = Callable[[Sequence[Record]], str | None]
"""What is seen in the last steps, the newest at the end, and what to try; None: nothing."""


def values(history: Sequence[Record], name: str) -> list[float]:
    """A metric of those steps that have it."""
    return [float(record[name]) for record in history if isinstance(record.get(name), int | float)]


def shown(text: str, values: Sequence[float]) -> str:
    """The text with the last value; empty where there is none."""
    return text.format(values[-1]) if values else ""
