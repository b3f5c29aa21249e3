"""Reading of YAML 1.2 that users write.

Text that stands for far more than a manifest needs is refused before it is built: ten lines of
nested aliases stand for a billion values, and nested brackets cost a stack of their depth. So a
text is first read as a stream of events, which costs neither.
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

# Largest file. An API server does not take larger objects.
MAX_BYTES = 1 << 20
MAX_DEPTH = 50
# Most values of a text, with the values behind every alias. A job has some hundred.
MAX_VALUES = 20_000


class DisproportionError(MarkedYAMLError):
    """The text is YAML and stands for more than a manifest needs."""


def load_all(text: str, kind: Literal["rt", "safe"] = "rt") -> Iterator[Any]:
    """Yield the documents of a text. Raises YAMLError, which `explain` puts into words."""
    check_proportion(text)
    with _values():
        yield from YAML(typ=kind).load_all(io.StringIO(text))


def load(text: str) -> Any:
    """Return the one value of a text, in plain types. Raises YAMLError."""
    check_proportion(text)
    with _values():
        return YAML(typ="safe").load(text)


@contextmanager
def _values() -> Iterator[None]:
    """Turn ValueErrors of ruamel (month 13, a number of 5,000 digits) into YAMLError."""
    try:
        yield
    except ValueError as error:
        raise YAMLError(str(error)) from error


def check_proportion(text: str) -> None:
    """Raise DisproportionError at the first place beyond a limit."""
    tally = _Tally()
    for event in YAML(typ="rt").parse(io.StringIO(text)):
        tally.add(event)


class _Tally:
    """Counter of the values that a stream of events stands for."""

    def __init__(self) -> None:
        self._values = 0
        # Values behind each anchor of this document whose node has ended.
        self._sizes: dict[str, int] = {}
        # Anchors of open collections, and the number of values before each.
        self._open: list[tuple[str | None, int]] = []

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
            raise _error(event, f"*{event.anchor} is inside of what it stands for")
        return self._sizes.get(
            event.anchor, 1
        )  # an anchor that is not there is the parser's affair


def _error(event: Any, problem: str) -> DisproportionError:
    return DisproportionError(problem=problem, problem_mark=event.start_mark)


def explain(error: YAMLError, source: str) -> str:
    """Return `source:line:column: what is wrong`, in one line."""
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
