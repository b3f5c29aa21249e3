"""Evaluates `[ ... ]` and `[[ ... ]]`.

The result is None if it depends on the machine, such as on its files, or on an unknown value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

Truth = bool | None
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt,
    "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_TEXTS = ("=", "==", "!=", "<", ">", "=~")
_JOINS = {"-a": "and", "&&": "and", "-o": "or", "||": "or"}


@dataclass(frozen=True, slots=True)
class Operand:
    """A word of a condition.

    is_known: False if `text` is not the value. pattern: the word as a regular expression, in `[[`.
    is_set: True if a variable of this name is set, for `-v`.
    """

    text: str
    is_known: bool = True
    pattern: str | None = None
    is_set: bool = False


def holds(words: list[Operand]) -> Truth:
    """Evaluate a condition; None if it is unknown or not a condition."""
    reader = _Reader(words)
    try:
        truth = reader.either() if words else False
    except IndexError:
        return None
    return truth if reader.at == len(words) else None


def negation(truth: Truth) -> Truth:
    """Negate; unknown stays unknown."""
    return None if truth is None else not truth


def both(left: Truth, right: Truth) -> Truth:
    """Combine by "and": false if one is false, else unknown if one is unknown."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def either(left: Truth, right: Truth) -> Truth:
    """Combine by "or": true if one is true, else unknown if one is unknown."""
    return negation(both(negation(left), negation(right)))


class _Reader:
    def __init__(self, words: list[Operand]) -> None:
        self.words, self.at = words, 0

    def _peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.words[at].text if at < len(self.words) else ""

    def _join(self) -> str:
        return _JOINS.get(self._peek(), "")

    def either(self) -> Truth:
        truth = self._both()
        while self._join() == "or":
            self.at += 1
            truth = either(truth, self._both())
        return truth

    def _both(self) -> Truth:
        truth = self._primary()
        while self._join() == "and":
            self.at += 1
            truth = both(truth, self._primary())
        return truth

    def _primary(self) -> Truth:
        word = self.words[self.at]
        if self._peek(1) in (*_TEXTS, *_NUMBERS) and self.at + 2 < len(self.words):
            self.at += 3
            return _compare(word, self.words[self.at - 2].text, self.words[self.at - 1])
        self.at += 1
        if word.text == "!" and word.is_known:
            return negation(self._primary())
        if word.text == "(":
            truth = self.either()
            self.at += 1
            return truth
        if re.fullmatch("-[a-zA-Z]", word.text) and self.at < len(self.words) and not self._join():
            self.at += 1
            return _unary(word.text, self.words[self.at - 1])
        return bool(word.text) if word.is_known else None


def _unary(name: str, word: Operand) -> Truth:
    match name:
        case "-n" | "-z":
            return _nonempty(word) if name == "-n" else negation(_nonempty(word))
        case "-v":
            return word.is_set
        case "-t":
            return False
    # Tests of files: only the machine knows.
    return None if word.text else False


def _nonempty(word: Operand) -> Truth:
    return bool(word.text) if word.is_known else None


def _compare(left: Operand, name: str, right: Operand) -> Truth:
    if not left.is_known or not right.is_known:
        return None
    if name in _NUMBERS:
        try:
            return _NUMBERS[name](int(left.text), int(right.text))
        except ValueError:
            return None if left.text and right.text else False
    if name == "=~":
        return _searched(left.text, right.text)
    if name in ("<", ">"):
        return left.text < right.text if name == "<" else left.text > right.text
    equal = (
        left.text == right.text
        if right.pattern is None
        else re.fullmatch(right.pattern, left.text, re.DOTALL) is not None
    )
    return equal == (name != "!=")


def _searched(text: str, pattern: str) -> Truth:
    """Evaluate `=~`; unknown if the pattern has expansions or quotes."""
    if re.search(r"[$'\"`]\w|\[:", pattern):
        return None
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None
