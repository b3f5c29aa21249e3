"""Answers of responses as numbers, by which evaluations let the majority vote (`maj@k`)."""

from __future__ import annotations

from collections.abc import Callable

from sluice.rewards.builtin import dapo, gsm8k
from sluice.rewards.builtin.extraction import answer_box
from sluice.rewards.builtin.math_prm800k import hendrycks
from sluice.rewards.types import Judgement, answer_number
from sluice.samples.sample import PREDICTION


def _boxed(response: str) -> str | None:
    answer = answer_box(response)
    return None if answer is None else hendrycks(answer)


# Name of a built-in reward -> the answer that it reads in a response, in plain form.
READERS: dict[str, Callable[[str], str | None]] = {
    "dapo": dapo.read_answer,
    "deepscaler": _boxed,
    "gsm8k": gsm8k.read_answer,
    "math": _boxed,
    "math_prm800k": _boxed,
}


def with_answer(judgement: Judgement, name: str, response: str) -> Judgement:
    """The judgement of a built-in reward with the answer's number as its part `pred` (verl's
    name), where there is an answer.
    """
    reward, parts = judgement
    answer = READERS[name](response) if name in READERS else None
    return judgement if answer is None else (reward, {**parts, PREDICTION: answer_number(answer)})
