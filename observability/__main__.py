"""Write the chart's dashboards and rules: `python -m observability charts/sluice/files`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from ruamel.yaml import YAML

from observability.alerts import alerts
from observability.dashboards import documents
from observability.recording import recordings


def files() -> dict[str, str]:
    """Texts of the generated files by path below the chart's `files` directory."""
    texts = {
        f"dashboards/{name}.json": json.dumps(document, indent=1, sort_keys=True) + "\n"
        for name, document in documents().items()
    }
    return texts | {"rules.yaml": rules()}


def rules() -> str:
    """Rules in Prometheus's file format. The chart's PrometheusRule has the same groups."""
    groups = [
        {"name": "sluice.recording", "rules": [recording.rule() for recording in recordings()]},
        {"name": "sluice.alerts", "rules": [alert.rule() for alert in alerts()]},
    ]
    yaml = YAML()
    yaml.width = 4096
    stream = io.StringIO()
    yaml.dump({"groups": groups}, stream)
    return "# Generated from observability/ by make observability.\n" + stream.getvalue()


def write(directory: Path) -> None:
    for name, text in files().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
