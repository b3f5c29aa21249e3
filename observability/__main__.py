"""Writes the chart's dashboards and rules: `python -m observability charts/sluice/files`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from observability import rules
from observability.dashboards import documents


def files() -> dict[str, str]:
    """Path below the chart's files -> text."""
    texts = {
        f"dashboards/{name}.json": json.dumps(document, indent=1, sort_keys=True) + "\n"
        for name, document in documents().items()
    }
    return texts | {"rules.yaml": rules.text()}


def write(directory: Path) -> None:
    for name, text in files().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
