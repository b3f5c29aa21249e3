"""Reads a model's answers as actions of an environment with Gymnasium's interface.

Spaces are recognised by the names of their classes, because an environment with the same interface
may have space classes other than gymnasium's.

Pure. It uses the standard library only, because it runs in the environment's interpreter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

_MAX_NUMBERS = 64  # of an action
# Spaces of arrays, and what the arrays contain.
_NUMBERS = {"MultiDiscrete": "integer", "MultiBinary": "number", "Box": "number"}


class SpaceError(Exception):
    """A space whose actions cannot be written as text, or wrong names of actions."""


class ActionError(ValueError):
    """An answer that is not an action. The message is for the model."""


class Actions(Protocol):
    """Reads a model's answers as actions."""

    @property
    def description(self) -> str:
        """Description of the actions for the model; may be empty."""

    def parse(self, answer: str) -> Any:
        """Read the action in an answer, ignoring the thoughts before it. Raises ActionError."""


def actions_of(space: Any, names: Sequence[str] | None) -> Actions:
    """Choose how answers are read as actions of a space.

    Parameters
    ----------
    space
        An action space of gymnasium. None: the environment has no space, and actions are texts.
    names
        Names of a discrete space's actions, in order, or None.

    Raises
    ------
    SpaceError
        The space cannot be written as text, or the names do not match it.

    """
    kind = _kind(space)
    if kind == "Discrete":
        return _choice(space, names)
    if names is not None:
        raise SpaceError(f"names require a Discrete space; this environment has {_describe(space)}")
    if kind in ("", "Text"):
        return TextActions(space)
    layout, size = _layout(space)
    if size > _MAX_NUMBERS:
        raise SpaceError(
            f"{_describe(space)} has {size} numbers, which are too many for a model to write"
        )
    return JsonActions(space, f"JSON: {layout}")


class TextActions(NamedTuple):
    """Actions that are texts."""

    space: Any  # None: any text
    description: str = ""

    def parse(self, answer: str) -> str:
        """Return the answer's text. Raises ActionError if the space does not contain it."""
        text = _without_thoughts(answer)
        if self.space is not None and not self.space.contains(text):
            raise ActionError(f"expected a text of {_describe(self.space)}")
        return text


class ChoiceActions(NamedTuple):
    """Actions of a discrete space: the last whole word of an answer that names one."""

    numbers: dict[str, int]  # by name in lower case
    pattern: str  # matches names
    description: str

    def parse(self, answer: str) -> int:
        """Return the number of the last action in the answer. Raises ActionError."""
        # 1 is not mentioned in 1.5, in 21, in x1 or in -1.
        whole = rf"(?<![\w.-])(?:{self.pattern})(?!\w|\.\d)"
        mentioned = [
            self.numbers[name]
            for name in re.findall(whole, _without_thoughts(answer).lower())
            if name in self.numbers
        ]
        if not mentioned:
            raise ActionError(f"expected {self.description}")
        return mentioned[-1]


class JsonActions(NamedTuple):
    """Actions that a model writes as JSON: the last JSON value of an answer that fits the space."""

    space: Any
    description: str

    def parse(self, answer: str) -> Any:
        """Return the last JSON value that fits the space. Raises ActionError."""
        for value in reversed(list(_values(_without_thoughts(answer)))):
            try:
                action = _convert(self.space, value)
            except (ValueError, TypeError, KeyError, OverflowError):
                continue
            if self.space.contains(action):
                return action
        raise ActionError(f"expected {self.description}")


def _without_thoughts(answer: str) -> str:
    return answer.rpartition("</think>")[2].strip()


def _kind(space: Any) -> str:
    """Return the name of gymnasium's class of a space: "" for None, "other" for unknown classes."""
    kinds = ("Discrete", "Text", "Tuple", "Dict", *_NUMBERS)
    names = [base.__name__ for base in type(space).__mro__]
    return "" if space is None else next((name for name in names if name in kinds), "other")


def _describe(space: Any) -> str:
    text = "no space of actions" if space is None else " ".join(str(space).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def _choice(space: Any, names: Sequence[str] | None) -> ChoiceActions:
    start, size = int(getattr(space, "start", 0)), int(space.n)
    if names is None:
        numbers = {str(number): number for number in range(start, start + size)}
        return ChoiceActions(numbers, r"-?\d+", _integer(space))
    numbers = {name.strip().lower(): start + index for index, name in enumerate(names)}
    if len(names) != size or len(numbers) != size or "" in numbers:
        raise SpaceError(
            f"expected {size} different names, one for each action of {_describe(space)}, found "
            f"{', '.join(names) or 'none'}"
        )
    longest_first = sorted(numbers, key=len, reverse=True)  # "up left" before "left"
    pattern = "|".join(map(re.escape, longest_first))
    return ChoiceActions(numbers, pattern, f"one of {', '.join(names)}")


def _integer(space: Any) -> str:
    start = int(getattr(space, "start", 0))
    return f"an integer from {start} to {start + int(space.n) - 1}"


def _layout(space: Any) -> tuple[str, int]:
    """Describe the JSON of a space's actions, and count its values. Raises SpaceError."""
    kind = _kind(space)
    if kind == "Discrete":
        return _integer(space), 1
    if kind == "Text":
        return "a text", 1
    if kind in _NUMBERS:
        size = _product(space.shape)
        text = f"a list of {' x '.join(map(str, space.shape))} {_NUMBERS[kind]}s"
        if size == 1:
            text = f"a list of one {_NUMBERS[kind]}" if space.shape else f"a {_NUMBERS[kind]}"
        return text + (_limits(space) if size <= _MAX_NUMBERS else ""), size
    if kind not in ("Tuple", "Dict"):
        raise SpaceError(f"a model's text cannot become an action of {_describe(space)}")
    inner = space.spaces if kind == "Dict" else dict(enumerate(space.spaces))
    parts = {name: _layout(part) for name, part in inner.items()}
    size = sum(part_size for _, part_size in parts.values())
    if kind == "Tuple":
        return f"a list of: {'; '.join(text for text, _ in parts.values())}", size
    fields = "; ".join(f"{json.dumps(name)}: {text}" for name, (text, _) in parts.items())
    return f"an object with {fields}", size


def _limits(space: Any) -> str:
    if _kind(space) == "MultiBinary":
        return ", each 0 or 1"
    if _kind(space) == "MultiDiscrete":
        low = getattr(space, "start", 0 * space.nvec)
        high = low + space.nvec - 1
    else:
        low, high = space.low, space.high
    return "".join(
        f" {word} {_bound(bound)}"
        for word, bound in (("from", low), ("to", high))
        if all(map(math.isfinite, bound.ravel()))
    )


def _bound(bound: Any) -> str:
    """Format an array, as one number if all its numbers are equal."""
    texts = [f"{number:g}" for number in bound.ravel().tolist()]
    return texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]"


def _product(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= int(length)
    return size


def _values(text: str) -> Iterator[Any]:
    """Yield the outermost JSON lists and objects in a text, or the whole text as JSON."""
    decoder, position, empty = json.JSONDecoder(), 0, True
    while start := re.search(r"[\[{]", text[position:]):
        position += start.start()
        try:
            value, position = decoder.raw_decode(text, position)
        except ValueError:
            position += 1
            continue
        empty = False
        yield value
    if empty:
        try:
            yield json.loads(text)
        except ValueError:
            return


def _convert(space: Any, value: Any) -> Any:
    """Convert a JSON value to the types of a space. Raises ValueError or the like if it cannot."""
    kind = _kind(space)
    if kind == "Tuple":
        return tuple(_convert(inner, part) for inner, part in zip(space.spaces, value, strict=True))
    if kind == "Dict":
        return {name: _convert(inner, value[name]) for name, inner in space.spaces.items()}
    if kind not in _NUMBERS:
        return value
    import numpy  # an environment with such spaces has numpy

    exact = numpy.asarray(value)
    action = exact.astype(space.dtype)
    if action.dtype.kind in "iu" and (exact != action).any():
        raise ValueError("a number that is not an integer")
    return action
