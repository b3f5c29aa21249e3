"""Shell patterns, and what `${NAME%pattern}`, `${NAME^^}` and `a{b,c}` do with texts."""

from __future__ import annotations

import re
from dataclasses import replace

from sluice_migrate.bash.lexer import PartKind, Word

_PIECES = re.compile(r"\[[!^]?\]?(?:\[:\w+:\]|[^\]])+\]|.", re.DOTALL)
_BRACES = re.compile(r"\{([^{}]*,[^{}]*|\d+\.\.\d+)\}")
_MOST_WORDS = 10_000
_CLASS = re.compile(r"\[:(\w+):\]")
_CLASSES = {
    "space": r"\s", "digit": "0-9", "alpha": "a-zA-Z", "alnum": "a-zA-Z0-9", "upper": "A-Z",
    "lower": "a-z", "blank": r" \t", "xdigit": "0-9a-fA-F", "punct": r"!-/:-@\[-`{-~",
}  # fmt: skip


def cased(text: str, operator: str) -> str:
    """`^`, `^^`, `,` and `,,`: the first letter or all, large or small."""
    change = str.upper if operator[0] == "^" else str.lower
    return change(text) if len(operator) == 2 else change(text[:1]) + text[1:]


def cut(text: str, operator: str, pattern: str) -> str:
    """The text without its shortest (`%`, `#`) or longest (`%%`, `##`) end that fits."""
    lengths = range(len(text) + 1) if len(operator) == 1 else range(len(text), -1, -1)
    for length in lengths:
        piece = text[len(text) - length :] if operator[0] == "%" else text[:length]
        if re.fullmatch(pattern, piece, re.DOTALL):
            return text[: len(text) - length] if operator[0] == "%" else text[length:]
    return text


def glob(text: str) -> str:
    """A shell pattern, none of it quoted, as a regular expression."""
    return "".join(map(_piece, _PIECES.findall(text)))


def _piece(piece: str) -> str:
    if piece in ("*", "?"):
        return ".*" if piece == "*" else "."
    if len(piece) == 1:
        return re.escape(piece)
    inner = _CLASS.sub(lambda match: _CLASSES.get(match[1], ""), piece[1:-1]).replace("[", "\\[")
    try:
        return re.compile(f"[^{inner[1:]}]" if inner[0] in "!^" else f"[{inner}]").pattern
    except re.error:
        return re.escape(piece)  # no set to bash either: `[z-a]`


def at_slash(operand: Word) -> tuple[Word, Word]:
    """`pattern/new` of `${NAME/pattern/new}`."""
    pattern, new = Word(operand.line), Word(operand.line)
    target = pattern
    for part in operand.parts:
        if target is pattern and part.kind is PartKind.TEXT and not part.quoted:
            before, separator, after = part.text.partition("/")
            pattern.parts.append(replace(part, text=before))
            if separator:
                target = new
                new.parts.append(replace(part, text=after))
        else:
            target.parts.append(part)
    return pattern, new


def braces(word: Word) -> list[Word]:
    """`a{b,c}d` -> `abd`, `acd`, where the braces and commas are not quoted.

    A word that would become too many stays as it is.
    """
    done: list[Word] = []
    waiting = [word]
    while waiting:
        first = waiting.pop(0)
        choices = _first_braces(first)
        done += [] if choices else [first]
        waiting = choices + waiting
        if len(done) + len(waiting) > _MOST_WORDS:
            return [word]
    return done


def _first_braces(word: Word) -> list[Word]:
    """The words that the first braces make of one; none where it has no braces."""
    for at, part in enumerate(word.parts):
        match = _BRACES.search(part.text)
        if match is None or part.quoted or part.kind is not PartKind.TEXT:
            continue
        before, behind = part.text[: match.start()], part.text[match.end() :]
        texts = [before + choice + behind for choice in _choices(match[1])]
        parts = word.parts
        return [
            Word(word.line, [*parts[:at], replace(part, text=text), *parts[at + 1 :]])
            for text in texts
        ]
    return []


def _choices(inner: str) -> list[str]:
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", inner):
        first, last = int(match[1]), int(match[2])
        step = 1 if last >= first else -1
        span = range(first, last + step, step)
        return [str(number) for number in span[: _MOST_WORDS + 1]]
    return inner.split(",")
