"""Observations of an environment of Gymnasium's interface, as a model reads them. Pure; the
standard library alone, since it runs in the environment's interpreter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MOST_NUMBERS = 512
"""Of an observation. One with more is a picture, or as little use to a model as one."""
_STYLE = re.compile(r"\x1b\[([\d;]*)m")
_MARKS = {"background": "[{}]", "bold": "*{}*", "colour": "<{}>"}


class NoTextError(Exception):
    """An observation that no text stands for. The message says what it is."""


def shown(observation: Any) -> str:
    """An observation as the model reads it: a text as it is, a dict as lines, all else as JSON.

    Raises NoTextError.
    """
    value = plain(observation)
    if (size := _numbers(value)) > MOST_NUMBERS:
        raise NoTextError(f"an observation of {size} numbers, as a picture has them")
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_line(of_name)}" for name, of_name in value.items())
    return _line(value)


def plain(value: Any) -> Any:
    """The value in types of JSON, floats to six digits. numpy's arrays and numbers become lists and
    numbers. Raises NoTextError.
    """
    if hasattr(value, "tolist"):
        if getattr(value, "size", 0) > MOST_NUMBERS:
            raise NoTextError(f"an observation of {value.size} numbers, as a picture has them")
        value = value.tolist()
    match value:
        case str() | bool() | int() | None:
            return value
        case float():
            return float(f"{value:.6g}")
        case list() | tuple():
            return [plain(one) for one in value]
        case dict():
            return {str(name): plain(one) for name, one in value.items()}
    raise NoTextError(f"an observation with a {type(value).__name__}")


def drawn(picture: str) -> str:
    """A drawing for a terminal, without its colours: [x] had a background, *x* was bold, <x> had
    another colour.
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
    """The style of an escape sequence. gymnasium writes a colour's, and bold or not, in one."""
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
