"""The table of model support, as tests write and check it.

A test with the mark `support(part, use)` shows the cell of the family that it is parametrized with:
`works` if it passes, or `fails: ` and the text that it records as the property `fails`. With
SLUICE_UPDATE_GOLDEN=1 (`make models`) the cells of the tests that ran are written, and if all
integration tests were collected, cells without a test are deleted. Otherwise a test whose cell says
something else has an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest

from sluice import model_support
from tests.integration.models.checkpoints import MODEL_TYPES

UPDATES = bool(os.environ.get("SLUICE_UPDATE_GOLDEN"))
HINT = "make models writes the table anew"


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """A place of the table."""

    model_type: str
    part: str
    use: str


@dataclass(slots=True)
class Shown:
    """What the tests of a session have shown."""

    tested: set[Cell] = field(default_factory=set)  # cells that some test is about
    outcomes: dict[Cell, list[str]] = field(default_factory=dict)


def cells(item: pytest.Item) -> Iterator[Cell]:
    """Yield the cells that a test shows.

    Its parameters say of which families, unless the mark does: `support(part, use, "qwen3")`.
    """
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    words = [value for value in params.values() if isinstance(value, str)]
    of_parameters = {MODEL_TYPES[word] for word in words if word in MODEL_TYPES}
    for mark in item.iter_markers("support"):
        part, use, *families = mark.args
        for model_type in families or of_parameters:
            yield Cell(model_type, part, use)


def outcome(item: pytest.Item) -> str:
    """Return what a test shows if it passes."""
    reason = dict(item.user_properties).get("fails")
    return model_support.failure(str(reason)) if reason else model_support.WORKS


def updated(table: model_support.Table, shown: Shown, *, whole: bool) -> model_support.Table:
    """Return the table with what a session has shown."""
    new = {cell: outcome for cell, outcome in _flat(table) if not whole or cell in shown.tested}
    for cell, outcomes in shown.outcomes.items():
        if "" in outcomes:
            new.pop(cell, None)  # a test of it has failed
        else:
            new[cell] = max(outcomes, key=lambda text: text != model_support.WORKS)
    return _nested(sorted(new.items()))


def _flat(table: model_support.Table) -> Iterator[tuple[Cell, str]]:
    for model_type, parts in table.items():
        for part, uses in parts.items():
            for use, text in uses.items():
                yield Cell(model_type, part, use), text


def _nested(entries: Iterable[tuple[Cell, str]]) -> model_support.Table:
    table: model_support.Table = {}
    for cell, text in entries:
        table.setdefault(cell.model_type, {}).setdefault(cell.part, {})[cell.use] = text
    return table


def write(table: model_support.Table) -> None:
    model_support.FILE.write_text(json.dumps(table, indent=2) + "\n")
