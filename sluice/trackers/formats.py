"""Forms in which libraries take samples, a job's spec, and names of metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sluice.telemetry import run_directory

# MLflow's rules: characters of a name that it refuses, and the longest value of a parameter.
_FORBIDDEN = re.compile(r"[^-\w ./:]", re.ASCII)
_MOST_CHARACTERS = 6000


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and cells: numbers and texts as they are, all else as JSON."""
    columns = [*dict.fromkeys(key for row in rows for key in row)]
    return columns, [[_cell(row.get(column)) for column in columns] for row in rows]


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float | str):
        return value
    return json.dumps(value, ensure_ascii=False)


def parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a spec as MLflow's parameters: name, and value as text."""
    for name, value in run_directory.leaves(config):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield metric_name(name), text[:_MOST_CHARACTERS]


def metric_name(name: str) -> str:
    """Return the name with `_` for what MLflow refuses, such as the @ of pass@4."""
    return _FORBIDDEN.sub("_", name)
