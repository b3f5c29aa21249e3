"""YAML 1.2 of people's files.

What is out of all proportion is refused before anything is built of it.

Ten lines of aliases of aliases stand for a billion values, and a reader of nested brackets
needs a stack, and time, of their depth. So a text is first looked at as a stream of events,
which costs neither.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    NodeEvent,
)

MAX_BYTES = 1 << 20
"""Of a file. An API server takes no larger object."""
MAX_DEPTH = 50
MAX_VALUES = 20_000
"""Of a text, with every alias counted as what it stands for. A job has some hundred."""


class DisproportionError(MarkedYAMLError):
    """The text is YAML, and stands for more than any manifest needs."""


def load_all(text: str, kind: Literal["rt", "safe"] = "rt") -> Iterator[Any]:
    """The documents of a text. Raises YAMLError; `explain` says it in words."""
    check_proportion(text)
    with _values():
        yield from YAML(typ=kind).load_all(io.StringIO(text))


def load(text: str) -> Any:
    """The one value of a text, in plain types; as above."""
    check_proportion(text)
    with _values():
        return YAML(typ="safe").load(text)


@contextmanager
def _values() -> Iterator[None]:
    """A date of the 13th month, or a number of 5,000 digits, is an error of Python's to ruamel."""
    try:
        yield
    except ValueError as error:
        raise YAMLError(str(error)) from error


def check_proportion(text: str) -> None:
    """Raises DisproportionError at the first place that goes too far."""
    tally = _Tally()
    for event in YAML(typ="rt").parse(io.StringIO(text)):
        tally.add(event)


class _Tally:
    """Counts the values that a stream of events stands for."""

    def __init__(self) -> None:
        self._values = 0
        self._sizes: dict[str, int] = {}
        """Values behind each anchor of this document whose node has ended."""
        self._open: list[tuple[str | None, int]] = []
        """Anchors of the collections that are open, and how many values were before each."""

    def add(self, event: Any) -> None:
        if isinstance(event, DocumentStartEvent):
            self._sizes = {}
        elif isinstance(event, CollectionEndEvent):
            anchor, before = self._open.pop()
            if anchor:
                self._sizes[anchor] = self._values - before
        elif isinstance(event, NodeEvent):
            self._add_node(event)

    def _add_node(self, event: Any) -> None:
        if isinstance(event, AliasEvent):
            self._values += self._of_alias(event)
        else:
            if isinstance(event, CollectionStartEvent):
                self._open.append((event.anchor, self._values))
            elif event.anchor:
                self._sizes[event.anchor] = 1
            self._values += 1
        if len(self._open) > MAX_DEPTH:
            raise _error(event, f"nested more than {MAX_DEPTH} levels deep")
        if self._values > MAX_VALUES:
            raise _error(
                event,
                f"up to here, with what its aliases stand for, more than {MAX_VALUES:,} values",
            )

    def _of_alias(self, event: Any) -> int:
        if any(anchor == event.anchor for anchor, _ in self._open):
            raise _error(event, f"*{event.anchor} stands inside of what it stands for")
        return self._sizes.get(
            event.anchor, 1
        )  # an anchor that is not there is the parser's affair


def _error(event: Any, problem: str) -> DisproportionError:
    return DisproportionError(problem=problem, problem_mark=event.start_mark)


def explain(error: YAMLError, source: str) -> str:
    """`source:line:column: what is wrong`, in one line."""
    if not isinstance(
        error, MarkedYAMLError
    ):  # a control character, of which ruamel tells only the place in the file
        return f"{source}: not valid YAML: {' '.join(str(error).split())}"
    mark = error.problem_mark or error.context_mark
    where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
    problem = error.problem or error.context
    return (
        f"{where}: {problem}"
        if isinstance(error, DisproportionError)
        else f"{where}: not valid YAML: {problem}"
    )
