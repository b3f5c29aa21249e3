"""Mathematics: 1 where the last boxed answer equals the label; else 0.

Equal means: spelled alike after MATH's normalisation, or the same value, set, interval, matrix or
equation for math-verify (Hugging Face), which reads LaTeX and plain expressions. Its time limit is
an alarm signal, which only a main thread can have: this reward runs in the judge's processes, never
in the worker's own.
"""

from __future__ import annotations

import logging
import re

from sluice.rewards.builtin.extraction import boxed
from sluice.rewards.builtin.math_prm800k import hendrycks, unboxed
from sluice.rewards.types import RewardInput, label_text

PARSE_SECONDS = 5
"""Of math-verify, for each of: reading the label, reading the answer, comparing."""

_WHOLE = re.compile(r"-?\d{1,300}")
_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "∞": "\\infty ", "π": "\\pi ", "×": "\\times ", "°": "", "\u00a0": " "}
)


def math(sample: RewardInput) -> float:
    answer = boxed(sample.response)
    label = unboxed(label_text(sample, "math"))
    return float(answer is not None and equal(answer, label))


def equal(answer: str, label: str) -> bool:
    """True where two answers, LaTeX or plain, say the same."""
    answer, label = answer.translate(_UNICODE).strip(), label.translate(_UNICODE).strip()
    if not answer or not label:
        return False
    if _WHOLE.fullmatch(answer) and _WHOLE.fullmatch(label):
        return int(answer) == int(label)
    return hendrycks(answer) == hendrycks(label) or _verified(answer, label)


def _verified(answer: str, label: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(
        logging.CRITICAL
    )  # it logs a stack for all that is no mathematics
    how = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    right = parse(f"\\boxed{{{label}}}", how, parsing_timeout=PARSE_SECONDS)
    parsed_answer = parse(f"\\boxed{{{answer}}}", how, parsing_timeout=PARSE_SECONDS)
    return bool(
        right and parsed_answer and verify(right, parsed_answer, timeout_seconds=PARSE_SECONDS)
    )
