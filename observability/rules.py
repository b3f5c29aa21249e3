"""The rules as Prometheus reads them from a file; a PrometheusRule has the same groups."""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML

from observability.alerts import alerts
from observability.recording import recordings

_HEAD = "# Generated from observability/ by make observability.\n"


def groups() -> list[dict[str, Any]]:
    return [
        {"name": "sluice.recording", "rules": [each.rule() for each in recordings()]},
        {"name": "sluice.alerts", "rules": [each.rule() for each in alerts()]},
    ]


def text() -> str:
    yaml = YAML()
    yaml.width = 4096
    stream = io.StringIO()
    yaml.dump({"groups": groups()}, stream)
    return _HEAD + stream.getvalue()
