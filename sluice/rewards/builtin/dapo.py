"""DAPO's reward for whole-number answers (Yu et al. 2025), as slime's `dapo` and verl's `math_dapo`
compute it.

The answer is what follows the last "Answer:" in the last 300 characters, brought into the plain
form of Minerva's grader (Lewkowycz et al. 2022, appendix D.1). `score` is 1 or -1, `acc` 1 or 0.
"""

from __future__ import annotations

import re

from sluice.rewards.types import RewardError, RewardInput, label_text

_END = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
# In this order: a later one may need that an earlier one has run.
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    "\\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
    "<|im_end|>",
    "<|endoftext|>",
)
_UNWRAPPED = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline"))


def dapo(sample: RewardInput) -> dict[str, float]:
    label = _whole(label_text(sample, "dapo"))
    answers = _ANSWER.findall(sample.response[-_END:])
    right = bool(answers) and plain(answers[-1]) == label
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def _whole(label: str) -> str:
    try:
        return str(int(float(plain(label))))
    except (ValueError, OverflowError):
        raise RewardError(f"label: dapo needs a whole number, the row has {label!r}") from None


def plain(answer: str) -> str:
    """An answer without units, text, LaTeX wrapping and thousands separators."""
    answer = answer.rpartition("=")[2]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for noise in _REMOVED:
        answer = answer.replace(noise, "")
    if formula := re.search(r"\$(.*?)\$", answer):
        answer = formula[1]
    for pattern in _UNWRAPPED:
        answer = pattern.sub(r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", answer)
    answer = re.sub(r"(sqrt)([^{])", r"sqrt{\2}", answer).replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
