"""Answers of commands, for people or (`-o json`, `-o yaml`) for programs."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any


class Format(StrEnum):
    """How a command writes its answer."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


def written(facts: Any, form: Format) -> str:
    """Facts as JSON or YAML text, with one line end."""
    if form is Format.JSON:
        return json.dumps(facts, indent=2, ensure_ascii=False, default=str) + "\n"
    from sluice_cli.render import to_yaml

    return to_yaml([json.loads(json.dumps(facts, default=str))])
