"""Tasks of reasoning-gym as rows, and its own scoring as the reward.

reasoning-gym (https://github.com/open-thought/reasoning-gym, `pip install reasoning-gym==0.1.25`)
makes as many problems of a kind as are asked for, each from its seed, and knows how to score an
answer. What a task takes (`min_terms`, `max_digits`, ...) is given as arguments of the source.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import reasoning_gym

from sluice.rewards import RewardInput

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
HELD_OUT = 10
"""One question of so many is held out."""
APART = 10**9
"""reasoning-gym makes problem i of seed + i: between two of our seeds there is room."""
Row = dict[str, Any]


def rows(
    task: str, size: int, seed: int = 0, held_out: bool = False, **settings: Any
) -> Iterator[Row]:
    """`size` problems of a task, as chat prompts.

    held_out: those, and only those, that no training row has, whatever the seeds.
    """
    most = 4 * HELD_OUT * size
    problems = reasoning_gym.create_dataset(task, size=most, seed=seed * APART, **settings)
    side = (one for one in problems if is_held_out(one["question"]) == held_out)
    for problem in islice(side, size):
        yield {
            "prompt": [{"role": "user", "content": problem["question"]}],
            "label": problem["answer"],
            "metadata": {"problem": problem},
        }


def is_held_out(question: str) -> bool:
    """The same for all questions with the same numbers, in any order and in any words."""
    numbers = sorted(NUMBER.findall(question)) or [question]
    return hashlib.blake2b(" ".join(numbers).encode()).digest()[0] % HELD_OUT == 0


def score(sample: RewardInput) -> float:
    """0 to 1: what reasoning-gym gives for the answer that a response ends with."""
    problem = sample.metadata["problem"]
    dataset = _dataset(problem["metadata"]["source_dataset"])
    return float(dataset.score_answer(answer(sample.response, str(sample.label)), problem))


def exact(sample: RewardInput) -> float:
    """1 for a right answer. reasoning-gym also pays a little for a wrong one of the right form."""
    return float(score(sample) == 1.0)


def answer(response: str, label: str) -> str:
    """The last number of a response where the label is one, else the last line."""
    if NUMBER.fullmatch(label):
        numbers: list[str] = NUMBER.findall(response)
        return numbers[-1].replace(",", "") if numbers else ""
    lines = response.strip().splitlines()
    return lines[-1] if lines else ""


@cache
def _dataset(task: str) -> Any:
    return reasoning_gym.create_dataset(task, size=1, seed=0)
