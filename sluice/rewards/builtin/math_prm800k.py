"""Mathematics as graded by slime's `math` and verl's prime_math, without their false positives.

An answer that cannot be right is wrong before any grader sees it (`notation.contradicts`): another
number, more values than the label, other words. Otherwise a boxed answer is right in two cases.
Either it equals the label after the normalisation of Hendrycks et al. (MATH, 2021), or PRM800K's
grader (Lightman et al. 2023) accepts it. That grader drops units, currency and text, then compares
tuples entry by entry; a fraction must be reduced, a whole number must be written as one, anything
else may be equal by sympy's `simplify`. Case matters.
"""

from __future__ import annotations

import re
from functools import partial

from sluice.rewards.builtin.extraction import answer_box, boxed
from sluice.rewards.builtin.notation import contradicts, number, plain, words
from sluice.rewards.types import RewardInput, label_text

_TEXT = re.compile(r"^\\text\{(.+?)\}$")
_UNITS = (
    "degree",
    "cm",
    "centimeter",
    "meter",
    "mile",
    "second",
    "minute",
    "hour",
    "day",
    "week",
    "month",
    "year",
    "foot",
    "feet",
    "inch",
    "yard",
)
_UNIT = tuple(re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?") for unit in _UNITS)
_WORDS = {
    "\\%": "", "%": "", "\\$": "", "$": "", " or ": " , ", " and ": " , ",
    "million": "*10^6", "billion": "*10^9", "trillion": "*10^12",
}  # fmt: skip
_SYMBOLS = {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"}
_THOUSANDS = re.compile(r"(\d),(\d\d\d)(?=$|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
# Powers and factorials that sympy may never finish. The text reaches an evaluator, so at most two
# unknowns are allowed too.
_TOO_HARD = re.compile(
    r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+|[)!] *!|[0-9]{4} *!|[0-9.][eE][+-]?[0-9]{3}"
)
_MOST_LETTERS = 2


def math_prm800k(sample: RewardInput) -> float:
    label = label_text(sample, "math_prm800k")
    answer = answer_box(sample.response)
    return float(answer is not None and agree(answer, unboxed(label)))


def unboxed(label: str) -> str:
    return (boxed(label) or label) if "\\boxed" in label or "\\fbox" in label else label


def agree(answer: str, label: str) -> bool:
    """Return whether an answer that does not contradict the label is accepted by either grader."""
    if not label.strip() or contradicts(answer, label):
        return False
    if words(plain(answer)) and words(plain(label)):
        return True
    return hendrycks(answer) == hendrycks(label) or _prm800k(answer, label)


# --- MATH


def hendrycks(answer: str) -> str:
    """Normalise LaTeX spellings; drop units, percent signs, degrees and spaces."""
    text = (
        _TEXT.sub(r"\1", answer.strip())
        .strip()
        .replace("\n", "")
        .replace("\\!", "")
        .replace("\\\\", "\\")
    )
    text = re.sub(r"[td]frac", "frac", text)
    for noise in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(noise, "")
    text = text.partition("\\text{ ")[0].replace("\\%", "")
    text = re.sub(r"(^|[ {])\.", r"\g<1>0.", text)
    name, _, value = text.partition("=")
    if value and "=" not in value and len(name) <= 2:  # "x = 5" answers what "5" answers
        text = value
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(0|-?[1-9]\d*)/(0|-?[1-9]\d*)$", r"\\frac{\1}{\2}", text)


# --- PRM800K


def _prm800k(answer: str, label: str) -> bool:
    answer, right = _normal(answer), _normal(label)
    if answer == right:
        return True
    if not answer or not right:
        return False
    ours, theirs = _entries(answer), _entries(right)
    brackets_differ = (answer[0], answer[-1]) != (right[0], right[-1])
    if len(ours) != len(theirs) or (len(theirs) > 1 and brackets_differ):
        return False
    return all(_entry_agrees(a, b) for a, b in zip(ours, theirs, strict=True))


def _normal(answer: str) -> str:
    text = _TEXT.sub(r"\1", answer)
    for before, after in _WORDS.items():
        text = text.replace(before, after)
    for unit in _UNIT:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    text = re.sub(r"\\sqrt *\[(\d+)\] *\{([^{}]*)\}", r"(\2)^(1/\1)", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    text = _as_whole(text) or text
    text = _without_latex(text) if "\\" in text else text
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)  # a mixed number: 7 3/4
    text = text.replace(" ", "").replace("{", "").replace("}", "")
    return _as_whole(_without_separators(text)) or text


def _without_latex(text: str) -> str:
    from pylatexenc.latex2text import LatexNodes2Text

    text = re.sub(r"\\[td]frac", r"\\frac", text).replace("\\frac", " \\frac")
    try:
        text = LatexNodes2Text().latex_to_text(text)
    except (ValueError, IndexError, RecursionError):  # what a model writes need not be LaTeX
        return text
    for symbol, name in _SYMBOLS.items():
        text = text.replace(symbol, name)
    return text.strip()


def _as_whole(text: str) -> str | None:
    """Return '12' for '12.0'; None if the text is not a whole number."""
    value = None if "frac" in text or "/" in text else number(text)
    return str(value) if value is not None and value.denominator == 1 else None


def _without_separators(text: str) -> str:
    while (shorter := _THOUSANDS.sub(r"\1\2", text)) != text:
        text = shorter
    return text


def _entries(text: str) -> list[str]:
    text = _without_separators(text)
    inner = text[1:-1]
    if (
        len(text) > 2
        and text[0] in "(["
        and text[-1] in ")]"
        and not any(c in inner for c in "()[]")
    ):
        return [entry.strip() for entry in inner.split(",")]
    return [text]


def _entry_agrees(answer: str, right: str) -> bool:
    if answer == right:
        return True
    if _FRACTION.match(answer) and _FRACTION.match(right):
        return False  # not reduced
    if (_as_whole(answer) is None) != (_as_whole(right) is None):
        return False
    return _sympy_agrees(answer, right)


def _sympy_agrees(answer: str, right: str) -> bool:
    difference = f"({right})-({answer})"
    letters = set(filter(str.isalpha, difference.replace("sqrt", "").replace("frac", "")))
    if len(letters) > _MOST_LETTERS or _TOO_HARD.search(difference):
        return False
    import sympy
    from sympy.parsing import sympy_parser as parser

    transformations = (*parser.standard_transformations, parser.implicit_multiplication_application)
    parse = partial(parser.parse_expr, transformations=transformations)
    try:
        return bool(sympy.simplify(parse(difference.replace("^", "**"))) == 0)
    except (
        Exception
    ):  # sympy raises many kinds of errors on invalid expressions, which are wrong answers
        return False
