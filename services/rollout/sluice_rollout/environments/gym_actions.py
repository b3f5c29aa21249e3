"""Answers of a model, as actions of an environment of Gymnasium's interface. Pure; the standard
library alone, since it runs in the environment's interpreter. Spaces are known by the names of
their classes: what has the same interface may have spaces of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

_MAX_NUMBERS = 64
"""Numbers of an action."""
_NUMBERS = {"MultiDiscrete": "integer", "MultiBinary": "number", "Box": "number"}
"""Spaces of arrays, and what is in them."""


class SpaceError(Exception):
    """A space whose actions no text becomes, or names that are not its. The message says which."""


class ActionError(ValueError):
    """An answer that is no action. The message is for the model."""


class Actions(Protocol):
    """Reads a model's answers. words: what the model is told of them, "" for nothing."""

    @property
    def words(self) -> str: ...

    def parse(self, answer: str) -> Any:
        """The action in an answer, without the thoughts before it. Raises ActionError."""


def actions_of(space: Any, names: Sequence[str] | None) -> Actions:
    """The actions of a space of gymnasium's; None: of an environment that has none, whose actions
    are texts. names: of a discrete space's actions, in their order. Raises SpaceError.
    """
    kind = _kind(space)
    if kind == "Discrete":
        return _choice(space, names)
    if names is not None:
        raise SpaceError(f"names are of a Discrete space; this environment has {_describe(space)}")
    if kind in ("", "Text"):
        return TextActions(space)
    layout, size = _layout(space)
    if size > _MAX_NUMBERS:
        raise SpaceError(f"{_describe(space)} has {size} numbers, which no model writes one by one")
    return JsonActions(space, f"JSON: {layout}")


class TextActions(NamedTuple):
    """Actions that are texts. space: which; None where the environment does not say."""

    space: Any
    words: str = ""

    def parse(self, answer: str) -> str:
        text = _without_thoughts(answer)
        if self.space is not None and not self.space.contains(text):
            raise ActionError(f"expected a text of {_describe(self.space)}")
        return text


class ChoiceActions(NamedTuple):
    """Actions of a discrete space: the last one that an answer mentions, as a word of its own.

    numbers: by name, in lower case. pattern: finds what may be one.
    """

    numbers: dict[str, int]
    pattern: str
    words: str

    def parse(self, answer: str) -> int:
        # 1 is not mentioned in 1.5, in 21, in x1 or in -1.
        whole = rf"(?<![\w.-])(?:{self.pattern})(?!\w|\.\d)"
        mentioned = [
            self.numbers[name]
            for name in re.findall(whole, _without_thoughts(answer).lower())
            if name in self.numbers
        ]
        if not mentioned:
            raise ActionError(f"expected {self.words}")
        return mentioned[-1]


class JsonActions(NamedTuple):
    """Actions that a model writes as JSON: the last value in an answer that is one."""

    space: Any
    words: str

    def parse(self, answer: str) -> Any:
        for value in reversed(list(_values(_without_thoughts(answer)))):
            try:
                action = _convert(self.space, value)
            except (ValueError, TypeError, KeyError, OverflowError):
                continue
            if self.space.contains(action):
                return action
        raise ActionError(f"expected {self.words}")


def _without_thoughts(answer: str) -> str:
    return answer.rpartition("</think>")[2].strip()


def _kind(space: Any) -> str:
    """The name of gymnasium's class that a space is of."""
    known = ("Discrete", "Text", "Tuple", "Dict", *_NUMBERS)
    names = [one.__name__ for one in type(space).__mro__]
    return "" if space is None else next((name for name in names if name in known), "other")


def _describe(space: Any) -> str:
    text = "no space of actions" if space is None else " ".join(str(space).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def _choice(space: Any, names: Sequence[str] | None) -> ChoiceActions:
    start, size = int(getattr(space, "start", 0)), int(space.n)
    if names is None:
        numbers = {str(number): number for number in range(start, start + size)}
        return ChoiceActions(numbers, r"-?\d+", _integer(space))
    numbers = {name.strip().lower(): start + place for place, name in enumerate(names)}
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
    """JSON of a space in words, and how many values have to be filled in. Raises SpaceError."""
    kind = _kind(space)
    if kind == "Discrete":
        return _integer(space), 1
    if kind == "Text":
        return "a text", 1
    if kind in _NUMBERS:
        size = _product(space.shape)
        what = f"a list of {' x '.join(map(str, space.shape))} {_NUMBERS[kind]}s"
        if size == 1:
            what = f"a list of one {_NUMBERS[kind]}" if space.shape else f"a {_NUMBERS[kind]}"
        return what + (_limits(space) if size <= _MAX_NUMBERS else ""), size
    if kind not in ("Tuple", "Dict"):
        raise SpaceError(f"a model's text cannot become an action of {_describe(space)}")
    inner = space.spaces if kind == "Dict" else dict(enumerate(space.spaces))
    parts = {name: _layout(one) for name, one in inner.items()}
    size = sum(of_part for _, of_part in parts.values())
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
    """One number where all of an array are the same."""
    texts = [f"{number:g}" for number in bound.ravel().tolist()]
    return texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]"


def _product(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= int(length)
    return size


def _values(text: str) -> Iterator[Any]:
    """The JSON values of a text: its lists and objects, those within others left out; else the
    whole of it.
    """
    decoder, place, empty = json.JSONDecoder(), 0, True
    while start := re.search(r"[\[{]", text[place:]):
        place += start.start()
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            place += 1
            continue
        empty = False
        yield value
    if empty:
        try:
            yield json.loads(text)
        except ValueError:
            return


def _convert(space: Any, value: Any) -> Any:
    """The value in the types of a space. Raises ValueError and the like where it cannot be."""
    kind = _kind(space)
    if kind == "Tuple":
        return tuple(_convert(one, part) for one, part in zip(space.spaces, value, strict=True))
    if kind == "Dict":
        return {name: _convert(one, value[name]) for name, one in space.spaces.items()}
    if kind not in _NUMBERS:
        return value
    import numpy  # what has such spaces has numpy

    exact = numpy.asarray(value)
    action = exact.astype(space.dtype)
    if action.dtype.kind in "iu" and (exact != action).any():
        raise ValueError("a number that is no integer")
    return action
