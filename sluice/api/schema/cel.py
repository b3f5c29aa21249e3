"""Texts of CEL, the language of the rules that an API server applies to a job.

Defaults are filled in before a rule is looked at, so that only fields without one may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

_RESERVED = ("function",)


def escaped(field: str) -> str:
    """A field's name as Kubernetes spells it where CEL reserves the word."""
    return f"__{field}__" if field in _RESERVED else field


def listed(names: Iterable[str]) -> str:
    """A list of these texts."""
    return "[" + ", ".join(f"'{name}'" for name in names) + "]"


def differs(path: str, default: Any) -> str:
    """The field at `path` has another value than its default; None: it has one at all."""
    if default is None:
        return f"has({path})"
    if default == []:
        return f"(has({path}) && size({path}) > 0)"
    if isinstance(default, BaseModel):
        return " || ".join(
            differs(f"{path}.{escaped(info.alias or name)}", getattr(default, name))
            for name, info in type(default).model_fields.items()
        )
    return f"{path} != {_literal(default)}"


def _literal(value: str | int | float | bool) -> str:
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)
