"""The one number that tells how training goes: the reward; where samples have none,
what is learned instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Metric -> its name for people, the most telling first.
HEADLINES = {
    "rollout/raw_reward": "reward",
    "train/opd_reverse_kl": "reverse KL",
    "train/loss": "loss",
}


def headline(records: Iterable[Mapping[str, Any]]) -> tuple[str, list[float]]:
    """(name, course) of a run's number, from the records of its steps in their order. Reward where
    there is nothing.
    """
    steps = list(records)
    for metric, name in HEADLINES.items():
        course = [float(record[metric]) for record in steps if metric in record]
        if course:
            return name, course
    return "reward", []
