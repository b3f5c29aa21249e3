"""Access to step records for the health rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WARM_UP_STEPS = 5
Record = Mapping[str, Any]
# Takes the last steps, newest last. Returns what is wrong and what to try, or None.
Rule = Callable[[Sequence[Record]], str | None]


def values(history: Sequence[Record], name: str) -> list[float]:
    """Return a metric of the steps that have it."""
    return [float(record[name]) for record in history if isinstance(record.get(name), int | float)]


def settled(history: Sequence[Record]) -> list[Record]:
    """Return the steps without the first few of each attempt of the trainer.

    Those compile kernels, capture graphs, set up communicators and let micro-batches grow, so their
    seconds say nothing about later steps.
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
    """Return these metrics of the last `steps` settled steps; None if there are fewer."""
    steady = settled(history)
    last = [values(steady, name)[-steps:] for name in names]
    return None if min(map(len, last)) < steps else last


def shown(text: str, values: Sequence[float]) -> str:
    """Format `text` with the last value; empty if there is no value."""
    return text.format(values[-1]) if values else ""
