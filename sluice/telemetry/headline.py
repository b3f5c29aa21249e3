"""The headline metric of a run: its reward, or what it learns if samples have no reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Label by metric, the most informative first.
HEADLINES = {
    "rollout/raw_reward": "reward",
    "train/opd_reverse_kl": "reverse KL",
    "train/loss": "loss",
}


def headline(records: Iterable[Mapping[str, Any]]) -> tuple[str, list[float]]:
    """Return the name and the values of a run's headline metric, in the order of its step records.

    Without any such metric the name is `reward` and there are no values.
    """
    steps = list(records)
    for metric, name in HEADLINES.items():
        course = [float(record[metric]) for record in steps if metric in record]
        if course:
            return name, course
    return "reward", []
