"""Countdown: worked solutions to learn from at first, and the reward.

A number is to be made of others, each used once. A solution tries: it takes two numbers, puts what
they make in their place, and so on until one is left; where that is not the target, it tries again
on the next line. The expression is the last line. Numbers 10, 5, 2 and the target 7:

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
    """A number, and the expression that makes it."""

    value: int
    text: str


class Try(NamedTuple):
    """Operations on all the numbers, as text, and what they make."""

    steps: tuple[str, ...]
    result: Term


def worked(size: int, seed: int = 0, wrong: int = 6, **settings: Any) -> Iterator[dict[str, Any]]:
    """Conversations for supervised fine-tuning: problems, each with a solution of up to `wrong`
    tries that fail, in any order, before one that does not.
    """
    draw = random.Random(seed)
    for row in tasks.rows("countdown", size, seed, **settings):
        facts = row["metadata"]["problem"]["metadata"]
        answer = {"role": "assistant", "content": solution(facts, draw, wrong)}
        yield {"messages": [*row["prompt"], answer]}


def solution(facts: dict[str, Any], draw: random.Random, wrong: int) -> str:
    """facts: `numbers` and `target`, for which there is a solution."""
    every = list(tries([Term(number, str(number)) for number in facts["numbers"]]))
    right = [one for one in every if one.result.value == facts["target"]]
    others = [one for one in every if one.result.value != facts["target"]]
    last = draw.choice(right)
    failed = draw.sample(others, min(draw.randint(0, wrong), len(others)))
    lines = [", ".join(one.steps) for one in (*failed, last)]
    return "\n".join([*lines, last.result.text.removeprefix("(").removesuffix(")")])


def tries(terms: list[Term], steps: tuple[str, ...] = ()) -> Iterator[Try]:
    """All ways to make one number of all, through whole numbers that are not negative."""
    if len(terms) == 1:
        yield Try(steps, terms[0])
    for one, other in combinations(range(len(terms)), 2):
        rest = [term for place, term in enumerate(terms) if place not in (one, other)]
        a, b = sorted((terms[one], terms[other]), key=lambda term: -term.value)
        for sign, value in operations(a.value, b.value).items():
            result = Term(value, f"({a.text}{sign}{b.text})")
            yield from tries([result, *rest], (*steps, f"{a.value}{sign}{b.value}={value}"))


def operations(a: int, b: int) -> dict[str, int]:
    """Signs and values, for an `a` that is not smaller than `b`."""
    values = {"+": a + b, "-": a - b, "*": a * b}
    return values | {"/": a // b} if b and a % b == 0 else values


def right(sample: RewardInput) -> float:
    """1 for an expression in the last line that makes the target, else 0.

    reasoning-gym pays a little for wrong ones; where all of a group are wrong, that little would be
    all that is learned from.
    """
    last = tasks.answer(sample.response, str(sample.label))
    return float(tasks.exact(sample)) if ARITHMETIC.fullmatch(last.strip()) else 0.0
