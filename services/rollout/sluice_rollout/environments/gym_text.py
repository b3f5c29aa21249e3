"""Writes observations of an environment with Gymnasium's interface as text for a model.

Pure. It uses the standard library only, because it runs in the environment's interpreter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# An observation with more numbers is a picture, or of as little use to a model.
MOST_NUMBERS = 512
_STYLE = re.compile(r"\x1b\[([\d;]*)m")
_MARKS = {"background": "[{}]", "bold": "*{}*", "colour": "<{}>"}


class NoTextError(Exception):
    """An observation that cannot be written as text. The message says what it is."""


def shown(observation: Any) -> str:
    """Write an observation as text: texts unchanged, dicts as lines, all else as JSON.

    Raises NoTextError.
    """
    value = plain(observation)
    if (size := _numbers(value)) > MOST_NUMBERS:
        raise NoTextError(f"an observation of {size} numbers, as in a picture")
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_line(part)}" for name, part in value.items())
    return _line(value)


def plain(value: Any) -> Any:
    """Convert a value to types of JSON, floats to six digits. Raises NoTextError.

    Arrays and numbers of numpy become lists and numbers.
    """
    if hasattr(value, "tolist"):
        if getattr(value, "size", 0) > MOST_NUMBERS:
            raise NoTextError(f"an observation of {value.size} numbers, as in a picture")
        value = value.tolist()
    match value:
        case str() | bool() | int() | None:
            return value
        case float():
            return float(f"{value:.6g}")
        case list() | tuple():
            return [plain(item) for item in value]
        case dict():
            return {str(name): plain(item) for name, item in value.items()}
    raise NoTextError(f"an observation with a {type(value).__name__}")


def drawn(picture: str) -> str:
    """Replace the styles of a terminal drawing by marks.

    [x] had a background, *x* was bold, <x> had a colour.
    """
    styles: list[str] = []
    parts = []
    for number, part in enumerate(_STYLE.split(picture)):
        if number % 2:
            styles = [*styles, *_styles(part)] if part not in ("", "0") else []
        elif part:
            for style in sorted(set(styles), key=list(_MARKS).index):
                part = _MARKS[style].format(part)
            parts.append(part)
    lines = [line.rstrip() for line in "".join(parts).splitlines()]
    return "\n".join(lines).strip("\n")


def _styles(codes: str) -> Iterator[str]:
    """Yield the style of an escape sequence. gymnasium writes colour and bold in one sequence."""
    numbers = [int(code) for code in codes.split(";") if code]
    if 1 in numbers:
        yield "bold"
    elif any(40 <= number <= 47 for number in numbers):
        yield "background"
    elif any(30 <= number <= 37 for number in numbers):
        yield "colour"


def _line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _numbers(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return sum(map(_numbers, value))
    return int(isinstance(value, int | float))
