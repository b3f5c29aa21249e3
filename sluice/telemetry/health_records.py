"""Steps of a run as the rules of its health read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WARM_UP_STEPS = 5
Record = Mapping[str, Any]
# What is seen in the last steps, the newest at the end, and what to try; None: nothing.
Rule = Callable[[Sequence[Record]], str | None]


def values(history: Sequence[Record], name: str) -> list[float]:
    """A metric of those steps that have it."""
    return [float(record[name]) for record in history if isinstance(record.get(name), int | float)]


def settled(history: Sequence[Record]) -> list[Record]:
    """The steps without the first few of each attempt of the trainer.

    Those compile kernels, capture graphs, meet in communicators and let micro-batches grow, so
    their seconds say nothing about the steps to come.
    """
    seen = Counter[Any]()
    steady = []
    for record in history:
        attempt = record.get("attempt")
        seen[attempt] += 1
        if seen[attempt] > WARM_UP_STEPS:
            steady.append(record)
    return steady


def recent(history: Sequence[Record], steps: int, *names: str) -> list[list[float]] | None:
    """These metrics of the last `steps` settled steps that have them; None: there are not so
    many.
    """
    steady = settled(history)
    last = [values(steady, name)[-steps:] for name in names]
    return None if min(map(len, last)) < steps else last


def shown(text: str, values: Sequence[float]) -> str:
    """The text with the last value; empty where there is none."""
    return text.format(values[-1]) if values else ""
