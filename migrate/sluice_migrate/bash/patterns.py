"""Shell patterns, brace expansion, and the text operators of `${NAME...}`."""

from __future__ import annotations

import re
from dataclasses import replace

from sluice_migrate.bash.lexer import PartKind, Word

_PIECES = re.compile(r"\[[!^]?\]?(?:\[:\w+:\]|[^\]])+\]|.", re.DOTALL)
_BRACES = re.compile(r"\{([^{}]*,[^{}]*|\d+\.\.\d+)\}")
# Nested braces such as {1..9}{1..9}{1..9} multiply.
_MOST_WORDS = 10_000
_CLASS = re.compile(r"\[:(\w+):\]")
# Character classes of patterns.
_CLASSES = {
    "space": r"\s", "digit": "0-9", "alpha": "a-zA-Z", "alnum": "a-zA-Z0-9", "upper": "A-Z",
    "lower": "a-z", "blank": r" \t", "xdigit": "0-9a-fA-F", "punct": r"!-/:-@\[-`{-~",
}  # fmt: skip


def change_case(text: str, operator: str) -> str:
    """Apply `^`, `^^`, `,` or `,,`: change the case of the first letter or of all letters."""
    change = str.upper if operator[0] == "^" else str.lower
    return change(text) if len(operator) == 2 else change(text[:1]) + text[1:]


def strip_affix(text: str, operator: str, pattern: str) -> str:
    """Remove the shortest (`%`, `#`) or longest (`%%`, `##`) suffix or prefix that matches."""
    lengths = range(len(text) + 1) if len(operator) == 1 else range(len(text), -1, -1)
    for length in lengths:
        piece = text[len(text) - length :] if operator[0] == "%" else text[:length]
        if re.fullmatch(pattern, piece, re.DOTALL):
            return text[: len(text) - length] if operator[0] == "%" else text[length:]
    return text


def glob(text: str) -> str:
    """Convert an unquoted shell pattern to a regular expression."""
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
        return re.escape(piece)  # bash takes an invalid set such as `[z-a]` literally


def split_replacement(operand: Word) -> tuple[Word, Word]:
    """Split the operand of `${NAME/pattern/new}` into pattern and new text."""
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


def expand_braces(word: Word) -> list[Word]:
    """Expand unquoted braces: `a{b,c}d` becomes `abd` and `acd`.

    A word that would expand to too many words stays as it is.
    """
    expanded: list[Word] = []
    queue = [word]
    while queue:
        first = queue.pop(0)
        choices = _first_braces(first)
        expanded += [] if choices else [first]
        queue = choices + queue
        if len(expanded) + len(queue) > _MOST_WORDS:
            return [word]
    return expanded


def _first_braces(word: Word) -> list[Word]:
    """Expand the first braces of a word; empty if it has no braces."""
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
