"""Countdown: worked solutions to learn from at first, and the reward.

The task is to make a number of others, each used once. A solution tries: it combines two numbers,
replaces them by the result, and goes on until one number is left. If that is not the target, it
tries again on the next line. The expression is the last line. Numbers 10, 5, 2 and the target 7:

    5*2=10, 10-10=0
    10+2=12, 12-5=7
    (10+2)-5
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from sluice.rewards import RewardInput

sys.path.insert(0, str(Path(__file__).parent))
import tasks  # type: ignore[import-not-found]

ARITHMETIC = re.compile(r"(?!.*\*\*)[\d()+\-*/ ]{1,80}")
"""reasoning-gym evaluates an answer. It gets none that is no arithmetic, or takes for ever."""


class Term(NamedTuple):
    """A number and the expression that makes it."""

    value: int
    text: str


class Try(NamedTuple):
    """Operations on all the numbers, as text, and their result."""

    steps: tuple[str, ...]
    result: Term


def worked(size: int, seed: int = 0, wrong: int = 6, **settings: Any) -> Iterator[dict[str, Any]]:
    """Return problems, each with a solution, for supervised fine-tuning.

    A solution has up to `wrong` tries that fail, in any order, before one that succeeds.
    """
    draw = random.Random(seed)
    for row in tasks.rows("countdown", size, seed, **settings):
        facts = row["metadata"]["problem"]["metadata"]
        answer = {"role": "assistant", "content": solution(facts, draw, wrong)}
        yield {"messages": [*row["prompt"], answer]}


def solution(facts: dict[str, Any], draw: random.Random, wrong: int) -> str:
    """Return a solution. facts: `numbers` and `target`, which must be solvable."""
    every = list(tries([Term(number, str(number)) for number in facts["numbers"]]))
    right = [one for one in every if one.result.value == facts["target"]]
    others = [one for one in every if one.result.value != facts["target"]]
    last = draw.choice(right)
    failed = draw.sample(others, min(draw.randint(0, wrong), len(others)))
    lines = [", ".join(one.steps) for one in (*failed, last)]
    return "\n".join([*lines, last.result.text.removeprefix("(").removesuffix(")")])


def tries(terms: list[Term], steps: tuple[str, ...] = ()) -> Iterator[Try]:
    """Yield all ways to make one number of all, through non-negative whole numbers."""
    if len(terms) == 1:
        yield Try(steps, terms[0])
    for one, other in combinations(range(len(terms)), 2):
        rest = [term for place, term in enumerate(terms) if place not in (one, other)]
        a, b = sorted((terms[one], terms[other]), key=lambda term: -term.value)
        for sign, value in operations(a.value, b.value).items():
            result = Term(value, f"({a.text}{sign}{b.text})")
            yield from tries([result, *rest], (*steps, f"{a.value}{sign}{b.value}={value}"))


def operations(a: int, b: int) -> dict[str, int]:
    """Yield signs and values for two numbers of which `a` is at least `b`."""
    values = {"+": a + b, "-": a - b, "*": a * b}
    return values | {"/": a // b} if b and a % b == 0 else values


def right(sample: RewardInput) -> float:
    """Return 1 if the expression in the last line makes the target, else 0.

    reasoning-gym pays a little for wrong ones. If a whole group is wrong, that little would be all
    that the model learns from.
    """
    last = tasks.answer(sample.response, str(sample.label))
    return float(tasks.exact(sample)) if ARITHMETIC.fullmatch(last.strip()) else 0.0
