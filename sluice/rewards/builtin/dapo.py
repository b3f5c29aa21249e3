"""DAPO's reward for short answers (Yu et al. 2025), as in slime's `dapo` and verl's `math_dapo`.

The answer follows the last "Answer:" in the last 300 characters. Without "Answer:" it is the
content of the last box, as in verl, because prompts of other sources request one. Answer and label
are normalised like Minerva's grader does (Lewkowycz et al. 2022, appendix D.1), which drops much;
an answer that cannot be right before that (`notation.contradicts`) is wrong. `score` is 1 or -1,
`acc` 1 or 0.
"""

from __future__ import annotations

import re

from sluice.rewards.builtin.extraction import after_thinking, boxed
from sluice.rewards.builtin.notation import contradicts
from sluice.rewards.types import RewardError, RewardInput, label_text

_END = 300
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+")
_WHOLE = re.compile(r"-?\d+\.0+")
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
# The order matters: later replacements rely on earlier ones.
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
    "<|eot_id|>",
    "<|endoftext|>",
)
_UNWRAPPED = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline"))


def dapo(sample: RewardInput) -> dict[str, float]:
    text = label_text(sample, "dapo")
    label, answer = _label(text), _announced(sample.response)
    right = answer is not None and plain(answer) == label and not contradicts(_bare(answer), text)
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def read_answer(response: str) -> str | None:
    """Return the normalised answer of a response; None if it has no answer."""
    answer = _announced(response)
    return None if answer is None else plain(answer)


def _announced(response: str) -> str | None:
    end = after_thinking(response)[-_END:]
    answers = _ANSWER.findall(end)
    return answers[-1] if answers else boxed(end)


def _bare(answer: str) -> str:
    """Return an answer without its box and end-of-turn token."""
    return re.sub(r"<\|\w+\|>", "", boxed(answer) or answer)


def _label(text: str) -> str:
    """Return the normalised label; a whole number loses its `.0`."""
    label = plain(text)
    if not label:
        raise RewardError(f"label: dapo needs an answer, the row has {text!r}")
    return label.partition(".")[0] if _WHOLE.fullmatch(label) else label


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
    answer = answer.strip()
    return answer.replace(",", "") if _GROUPED.fullmatch(answer) else answer
