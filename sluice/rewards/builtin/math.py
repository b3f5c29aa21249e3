"""Mathematics: 1 if the last boxed answer equals the label, else 0.

The comparison prefers false negatives to false positives:

1. Answers with the same spelling are equal (`notation.plain`).
2. An answer must have as many values as the label. Lists and sets are compared in any order, tuples
   and intervals in order, entry by entry.
3. Numbers are compared exactly, as fractions. A decimal may stand for a number that no decimal can
   write (1/3, pi, a root) if they differ by at most 1e-6 of it.
4. Words, also names such as ``ABCD``, are compared letter by letter.
5. Other expressions and equations are read by latex2sympy and compared by math-verify (both Hugging
   Face), case-sensitively and without its absolute rounding.

The time limit is an alarm signal, which works on the main thread only, so this reward runs in the
judging processes and not in the worker.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

from sluice.rewards.builtin.extraction import answer_box
from sluice.rewards.builtin.math_prm800k import unboxed
from sluice.rewards.builtin.notation import (
    DEEPEST,
    LONGEST,
    brackets,
    has_letter,
    is_decimal,
    is_name,
    is_product,
    listed,
    nesting,
    number,
    plain,
    same_number,
    same_words,
    sides,
    split,
    squeezed,
    unreadable,
    values,
    without_unit,
    words,
)
from sluice.rewards.types import RewardInput, label_text

if TYPE_CHECKING:
    from sympy import Basic

T = TypeVar("T")

# Time limit of one comparison.
SECONDS = 15

_ROUNDING = Fraction(1, 10**6)
_DIGITS = 50  # of numbers that have no exact form
_MOST_VALUES = 32
_LONGEST_EXPRESSION = 1000
_DEEPEST = 8  # brackets in brackets
_LARGEST_POWER = 10_000
_ROUNDLY = re.compile(r"\\approx(?![a-z])|\\simeq(?![a-z])")
# Operators of a question: the answer has not been worked out.
_UNWORKED = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|max|min|gcd|lcm|det|b?mod|pmod)(?![a-z])"
    r"|\\frac\s*\{\s*(?:d|\\partial)[^{}]{0,9}\}\s*\{\s*(?:d|\\partial)\s*[a-z][^{}]{0,3}\}|'"
)
_IN_A_BASE = re.compile(r"\d\s*_")
_INEQUALITY = re.compile(r"[<>]|\\[lg]eq?(?![a-z])")
_DECIMAL = re.compile(r"\d+\.\d+")
# ABC is no product of A, B and C; and a letter I is not the imaginary unit.
_POINTS = re.compile(r"(?<![a-zA-Z\\])(?:[A-Z]{3,}|I)(?![a-zA-Z])")
_DEGREES = re.compile(r"(\d+)\s*\^\s*\{?\s*\\circ\s*\}?")


def math(sample: RewardInput) -> float:
    label = unboxed(label_text(sample, "math"))
    answer = answer_box(sample.response)
    return float(answer is not None and equal(answer, label))


def equal(answer: str, label: str) -> bool:
    """Return whether two answers, LaTeX or plain, have the same value."""
    if max(len(answer), len(label)) > LONGEST or nesting(answer) > DEEPEST:
        return False
    answer, label = plain(answer), plain(label)
    return bool(answer and label) and _within_time(_same, answer, label)


def _same(answer: str, label: str, depth: int = 0) -> bool:
    if squeezed(answer) == squeezed(label):
        return True
    if depth > _DEEPEST or not answer or not label:
        return False
    ours, theirs = listed(answer), listed(label)
    if len(ours) != 1 or len(theirs) != 1:
        return _same_set(ours, theirs, depth + 1)
    if values(answer) != ours and values(label) == theirs:  # a set of one element
        return False
    return _same_value(ours[0], theirs[0], depth)


def _same_value(answer: str, label: str, depth: int) -> bool:
    if (same := same_number(answer, label)) is not None:
        return same or _rounded(answer, label)
    said, expected = words(answer), words(label)
    if said is not None and expected is not None:
        if same_words(said, expected):
            return True
        if not (is_product(said) and is_product(expected)):
            return False
    if len(sides(answer)) > 1 or len(sides(label)) > 1:
        return _same_equation(answer, label, depth + 1)
    if _ROUNDLY.search(answer):
        return _same_rounded(answer, label, depth + 1)
    return _same_shape(answer, label, depth + 1)


def _same_set(answer: list[str], label: list[str], depth: int) -> bool:
    """Compare values in any order; each value of the label takes one of the answer."""
    if len(answer) != len(label) or len(answer) > _MOST_VALUES:
        return False
    left = list(answer)
    for value in label:
        partner = next((other for other in left if _same(other, value, depth)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _same_shape(answer: str, label: str, depth: int) -> bool:
    """Compare sets, tuples, intervals and unions by their entries, the rest as expressions."""
    ours, theirs = (split(re.sub(r"\\cup(?![a-z])", "\0", text), "\0") for text in (answer, label))
    if len(ours) > 1 or len(theirs) > 1:
        return _same_set(ours, theirs, depth)
    inside, expected = brackets(answer), brackets(label)
    if inside and expected and ("," in inside[1] or "," in expected[1]):
        if (inside[0], inside[2]) != (expected[0], expected[2]):
            return False
        entries = [split(text[1], ",;") for text in (inside, expected)]
        return len(entries[0]) == len(entries[1]) and all(
            _same(a.strip(), b.strip(), depth) for a, b in zip(*entries, strict=True)
        )
    lists, expects_list = (pair and "," in pair[1] for pair in (inside, expected))
    # Only an inequality may say what an interval says.
    if bool(lists) != bool(expects_list) and not _INEQUALITY.search(answer + label):
        return False
    (value, unit), (right, expected_unit) = without_unit(answer), without_unit(label)
    if unit and expected_unit and unit != expected_unit:
        return False
    if (value, right) != (answer, label):
        return _same(value, right, depth)
    return _same_expression(answer, label)


def _same_equation(answer: str, label: str, depth: int) -> bool:
    """Compare ``x = 5`` with 5 or with another equation.

    Every side of the answer but a name and the steps to the value must be the label: `6 = 7` says
    two things.
    """
    ours, theirs = sides(answer), sides(label)
    named, expected_name = is_name(ours[0]), is_name(theirs[0])
    if len(theirs) > 1:
        if len(ours) > 1 and not (
            named and expected_name and squeezed(ours[0]) == squeezed(theirs[0])
        ):
            return _same_expression(answer, label)
        if not expected_name:
            return False
    right = theirs[-1]
    said = ours[1:] if named and len(ours) > 1 else ours
    if named and not has_letter(right):
        said = [*(side for side in said[:-1] if not has_letter(side)), said[-1]]
    return all(_same(side, right, depth) for side in said)


def _same_rounded(answer: str, label: str, depth: int) -> bool:
    r"""Compare ``\sqrt{2} \approx 1.41``: the first side is the answer, the others round it."""
    first, *others = (side.strip() for side in split(_ROUNDLY.sub("\0", answer), "\0"))
    if not first:
        return len(others) == 1 and _same(others[0], label, depth)
    return _same(first, label, depth) and all(_near(side, first) for side in others)


def _near(rounded: str, exact: str) -> bool:
    """Return whether a number rounds another, to two digits or better."""
    ours, theirs = _approximation(rounded), _approximation(exact)
    return (
        ours is not None
        and theirs is not None
        and abs(ours - theirs) <= Fraction(1, 100) * abs(theirs)
    )


def _approximation(text: str) -> Fraction | None:
    """Return a number with many digits; None if the text is not a number."""
    value = number(without_unit(text)[0])
    return value if value is not None else _tried(_evaluated, text)


# --- numbers that no decimal can write


def _rounded(answer: str, label: str) -> bool:
    """Return whether one of two numbers is a decimal for the other, a fraction such as 1/3."""
    a, b = (number(without_unit(text)[0]) for text in (answer, label))
    if a is None or b is None or _terminates(a) == _terminates(b):
        return False
    return abs(a - b) <= _ROUNDING * abs(b)


def _terminates(value: Fraction) -> bool:
    """Return whether a decimal with finitely many digits can write the number."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


# --- expressions


def _same_expression(answer: str, label: str) -> bool:
    for text in (answer, label):
        if len(text) > _LONGEST_EXPRESSION:
            return False
        if unreadable(text) or "\\text" in text or _IN_A_BASE.search(text):
            return False
    if _UNWORKED.search(answer) and not _UNWORKED.search(label):
        return False
    for decimal, other in ((answer, label), (label, answer)):
        if is_decimal(decimal):
            exact, value = number(decimal), _tried(_evaluated, other)
            if exact is None or value is None:
                return False
            return abs(exact - value) <= _ROUNDING * abs(value)
    return bool(_tried(_verified, answer, label))


def _within_time(compare: Callable[[str, str], bool], answer: str, label: str) -> bool:
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    # It logs a traceback for every text that is not mathematics.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    try:
        return bool(timeout(timeout_seconds=SECONDS)(compare)(answer, label))
    except TimeoutException:
        return False


def _tried(function: Callable[..., T], *arguments: str) -> T | None:
    """Return what a function of sympy returns, None if it fails."""
    try:
        return function(*arguments)
    except Exception:  # sympy and antlr raise many kinds of errors on invalid expressions
        return None


def _evaluated(text: str) -> Fraction | None:
    value = _parsed(text, is_real=True).doit().evalf(_DIGITS)
    return Fraction(str(value)) if value.is_Float and value.is_finite else None


def _verified(answer: str, label: str) -> bool:
    from math_verify import verify
    from math_verify.grader import should_treat_as_complex

    is_real = not (should_treat_as_complex(answer) or should_treat_as_complex(label))
    right, parsed = (_parsed(text, is_real=is_real) for text in (label, answer))
    return bool(
        verify(
            right,
            parsed,
            numeric_precision=_DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def _parsed(text: str, *, is_real: bool) -> Basic:
    """Read LaTeX as sympy does, with letters in their case and decimals exact."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    text = _DEGREES.sub(r"\\frac{\1\\pi}{180}", text)
    text = _POINTS.sub(r"\\text{\g<0>}", _DECIMAL.sub(_exact, text))
    spelled = normalize_latex(
        text, NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
    )
    expression = latex2sympy(
        spelled,
        is_real=is_real,
        normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=False),
    )
    if any(map(_is_too_large, _nodes(expression))):
        raise ValueError("a power or a factorial of too many digits")
    return _with_own_symbols(expression)


def _exact(match: re.Match[str]) -> str:
    value = Fraction(match[0])
    return rf"{{\frac{{{value.numerator}}}{{{value.denominator}}}}}"


def _nodes(expression: Any) -> Any:
    from sympy import MatrixBase, preorder_traversal

    parts = expression.flat() if isinstance(expression, MatrixBase) else [expression]
    return (node for part in parts for node in preorder_traversal(part))


def _is_too_large(node: Any) -> bool:
    """Return whether sympy might write out millions of digits, which no alarm can stop."""
    from sympy import Pow, binomial, factorial

    if isinstance(node, Pow) and node.exp.is_number:
        if node.exp.is_Number:
            return bool(abs(node.exp) > _LARGEST_POWER)
        return bool(node.exp.has(Pow, factorial))
    return isinstance(node, factorial | binomial) and any(
        argument.is_number and (not argument.is_Number or argument > _LARGEST_POWER)
        for argument in node.args
    )


def _with_own_symbols(expression: Any) -> Any:
    """Rename symbols, so that math-verify does not take E for e, nor words for products."""
    from sympy import I, Symbol

    renamed = {
        symbol: I
        if symbol.name == "i"
        else Symbol(symbol.name.encode().hex(), **symbol.assumptions0)
        for symbol in expression.atoms(Symbol)
    }
    return expression.xreplace(renamed)
