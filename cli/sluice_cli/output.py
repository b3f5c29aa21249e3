"""Output formats of commands."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any


class Format(StrEnum):
    """Output format: text for people, JSON or YAML for programs."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


def written(facts: Any, form: Format) -> str:
    """Return facts as JSON or YAML text that ends with a line end."""
    if form is Format.JSON:
        return json.dumps(facts, indent=2, ensure_ascii=False, default=str) + "\n"
    from sluice_cli.render import to_yaml

    return to_yaml([json.loads(json.dumps(facts, default=str))])
