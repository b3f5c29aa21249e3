"""Verdicts of each grader on the answers in `data/answers.jsonl`.

A row has a label, an answer, whether a mathematician (or a reader) calls it right, and why. Most
are wrong: what a model under reward pressure would write. The verdicts come from the subject, never
from a grader.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sluice.rewards import RewardInput
from sluice.rewards.builtin.code import code
from sluice.rewards.builtin.contains import contains
from sluice.rewards.builtin.dapo import dapo
from sluice.rewards.builtin.deepscaler import deepscaler
from sluice.rewards.builtin.exact_match import exact_match
from sluice.rewards.builtin.f1 import f1
from sluice.rewards.builtin.gsm8k import gsm8k
from sluice.rewards.builtin.ifbench import ifbench
from sluice.rewards.builtin.math import math
from sluice.rewards.builtin.math_prm800k import math_prm800k
from sluice.rewards.builtin.multiple_choice import gpqa, multiple_choice

ANSWERS = Path(__file__).parent / "data" / "answers.jsonl"
CHOICES = ["red cat", "blue cat", "green cat", "white cat"]
BOXED = "The answer is $\\boxed{{{}}}$."


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    kind: str
    label: Any
    answer: str
    right: bool
    why: str


@dataclass(frozen=True, slots=True)
class Grader:
    """A grader, the kinds of rows that it judges, and how a response to each gives the answer."""

    name: str
    judge: Callable[[RewardInput], Any]
    forms: dict[str, str]


def math_verify_alone(sample: RewardInput) -> float:
    """Grade as math-verify does with its defaults, label and response parsed from a box."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return float(verify(parse(BOXED.format(sample.label)), parse(sample.response)))


GRADERS = [
    Grader("math", math, {"math": BOXED, "response": "{}"}),
    Grader("math-verify alone", math_verify_alone, {"math": BOXED, "response": "{}"}),
    Grader("math_prm800k", math_prm800k, {"math": BOXED, "response": "{}"}),
    Grader("deepscaler", deepscaler, {"math": "</think>" + BOXED}),
    Grader("dapo", dapo, {"math": "Answer: {}"}),
    Grader("gsm8k", gsm8k, {"number": "So it is\n#### {}"}),
    Grader("multiple_choice", multiple_choice, {"choice": "{}"}),
    Grader("gpqa", gpqa, {"choice": "{}"}),
    Grader("exact_match", exact_match, {"text": "{}"}),
    Grader("contains", contains, {"text": "{}"}),
    Grader("f1", f1, {"text": "{}"}),
    Grader("code", code, {"code": "{}"}),
    Grader("ifbench", ifbench, {"ifbench": "{}"}),
]


@cache
def rows() -> list[Row]:
    return [Row(**json.loads(line)) for line in ANSWERS.read_text().splitlines()]


def sample_of(row: Row, form: str) -> RewardInput:
    metadata: dict[str, Any] = {}
    if row.kind == "choice":
        metadata = {"choices": CHOICES}
    elif row.kind == "ifbench":
        metadata = row.label
    return RewardInput("p", form.format(row.answer), row.label, metadata)


@dataclass(frozen=True, slots=True)
class Rates:
    """Ids of the wrong answers that a grader pays, and of the right ones that it does not."""

    false_positives: list[str]
    false_negatives: list[str]
    wrong: int
    right: int

    def cells(self) -> str:
        positives, negatives = len(self.false_positives), len(self.false_negatives)
        return (
            f"{positives} of {self.wrong} ({positives / self.wrong:.1%}) | "
            f"{negatives} of {self.right} ({negatives / self.right:.1%})"
        )


@cache
def rates(name: str) -> Rates:
    """Judge the rows of a grader's kinds; it pays an answer if its reward is 1."""
    grader = next(grader for grader in GRADERS if grader.name == name)
    judged = [row for row in rows() if row.kind in grader.forms]
    paid = {row.id for row in judged if _pays(grader.judge(sample_of(row, grader.forms[row.kind])))}
    wrong = [row.id for row in judged if not row.right]
    right = [row.id for row in judged if row.right]
    return Rates(
        [id_ for id_ in wrong if id_ in paid],
        [id_ for id_ in right if id_ not in paid],
        len(wrong),
        len(right),
    )


def _pays(value: Any) -> bool:
    return bool((value["score"] if isinstance(value, dict) else value) == 1)


def line(name: str) -> str:
    """The line of a grader in the table of docs/rewards.md."""
    shown = name if " " in name else f"`{name}`"
    return f"| {shown} | {rates(name).cells()} |"
