"""Answers of responses as numbers, which evaluations use for majority votes (`maj@k`)."""

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


# By built-in reward: returns the normalised answer that it reads in a response.
READERS: dict[str, Callable[[str], str | None]] = {
    "dapo": dapo.read_answer,
    "deepscaler": _boxed,
    "gsm8k": gsm8k.read_answer,
    "math": _boxed,
    "math_prm800k": _boxed,
}


def with_answer(judgement: Judgement, name: str, response: str) -> Judgement:
    """Add the answer's number to the parts of a built-in reward as `pred` (verl's name), if any."""
    reward, parts = judgement
    answer = READERS[name](response) if name in READERS else None
    return judgement if answer is None else (reward, {**parts, PREDICTION: answer_number(answer)})
