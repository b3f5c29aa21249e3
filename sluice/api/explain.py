"""One field of an RLJob, explained from the API's own types: `sluice explain trainer.steps`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import Any

from sluice.api.base import Model
from sluice.api.changes import CONTINUED, MUTABLE, covers
from sluice.api.crd import schema_of
from sluice.api.job import RLJobSpec
from sluice.api.load import ManifestError
from sluice.api.reference import type_of
from sluice.api.status import RLJobStatus
from sluice.api.words import meant

ROOTS: dict[str, type[Model]] = {"spec": RLJobSpec, "status": RLJobStatus}
_WIDTH = 88
_INT32 = 2**31 - 1
_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
    "maxLength": "characters, at most",
    "maxItems": "entries, at most",
    "pattern": "pattern",
}


@dataclass(frozen=True, slots=True)
class ExplainedField:
    """field: `spec.data.prompts[].path`. default: None where it is required, or there is none.
    changes: when it may change. rules: what is refused. children: (name, type, meaning).
    """

    field: str
    type: str
    meaning: str
    required: bool = False
    default: Any = None
    limits: dict[str, Any] = attribute(default_factory=dict)
    changes: str = ""
    rules: tuple[str, ...] = ()
    children: tuple[tuple[str, str, str], ...] = ()

    def facts(self) -> dict[str, Any]:
        """The shape of `-o json`."""
        names = ("name", "type", "meaning")
        return {
            "field": self.field,
            "type": self.type,
            "required": self.required,
            "default": self.default,
            "limits": self.limits,
            "meaning": self.meaning,
            "changes": self.changes,
            "rules": list(self.rules),
            "fields": [dict(zip(names, child, strict=True)) for child in self.children],
        }

    def text(self) -> str:
        """For people: a head of short lines, the meaning, what is in it."""
        default = "required" if self.required else json.dumps(self.default)
        head = [self.field, f"  type     {self.type}"]
        head += [f"  default  {default}"] if self.required or self.default is not None else []
        head += [f"  limit    {_LIMITS[name]} {value}" for name, value in self.limits.items()]
        head += [f"  changes  {self.changes}"] if self.changes else []
        meaning = ["", textwrap.fill(self.meaning, _WIDTH)] if self.meaning else []
        rules = ["", "rules", *(_item(rule) for rule in self.rules)] if self.rules else []
        return "\n".join([*head, *meaning, *rules, *self._children()])

    def _children(self) -> Iterator[str]:
        if self.children:
            yield from ("", "fields")
        width = max((len(name) for name, _, _ in self.children), default=0)
        for name, kind, meaning in self.children:
            yield f"  {name:<{width}}  {kind}"
            yield from textwrap.wrap(
                meaning, _WIDTH, initial_indent="    ", subsequent_indent="    "
            )


def explained(text: str) -> ExplainedField:
    """The field that a dotted path names; `spec.` may be left out, indices are not needed.

    Raises ManifestError, with what may be meant.
    """
    parts = [part for part in re.sub(r"\[\w*\]", "", text).split(".") if part]
    if not parts or parts[0] not in ROOTS:
        parts.insert(0, "spec")
    schema, path, required = schema_of(ROOTS[parts[0]]), parts[0], True
    for part in parts[1:]:
        holder = _inner(schema)
        properties = holder.get("properties", {})
        if part not in properties:
            known = meant(part, properties) if properties else f"{path} has no fields of ours"
            raise ManifestError(f"{path}.{part}: there is no such field; {known}")
        required = part in holder.get("required", [])
        schema, path = properties[part], f"{path}.{part}{_brackets(properties[part])}"
    return _field(path, schema, required=required and len(parts) > 1)


def completions(incomplete: str) -> list[str]:
    """Fields whose path begins so, one level deep, for a shell."""
    parent, dot, start = incomplete.rpartition(".")
    try:
        names = [name for name, _, _ in explained(parent or "spec").children]
    except ManifestError:
        return []
    top = [] if parent else list(ROOTS)
    return [f"{parent}{dot}{name}" for name in (*names, *top) if name.startswith(start)]


def _field(path: str, schema: dict[str, Any], *, required: bool) -> ExplainedField:
    inner = _inner(schema)
    default = schema.get("default")
    return ExplainedField(
        field=path,
        type=type_of(schema),
        meaning=_plain(schema) or _plain(inner),
        required=required,
        default=None if isinstance(default, dict) else default,
        limits=_limits(schema),
        changes=_changes(path.removeprefix("spec.")) if path.startswith("spec.") else "",
        rules=tuple(_rule(rule) for rule in inner.get("x-kubernetes-validations", [])),
        children=tuple(
            (name, type_of(child), _plain(child))
            for name, child in inner.get("properties", {}).items()
        ),
    )


def _limits(schema: dict[str, Any]) -> dict[str, Any]:
    """By the names of JSON Schema; an OpenAPI schema says `exclusiveMinimum: true` beside the
    minimum. Limits of the machine (int32) are left out.
    """
    limits = {name: schema[name] for name in _LIMITS if name in schema}
    for edge in ("Minimum", "Maximum"):
        if limits.get(f"exclusive{edge}") is True:
            limits[f"exclusive{edge}"] = limits.pop(edge.lower())
    return {name: value for name, value in limits.items() if value != _INT32}


def _changes(path: str) -> str:
    """When a field of the spec may change, in words."""
    if covers(MUTABLE, path):
        return "at any time"
    if any(each.startswith(f"{path}.") for each in (*MUTABLE, *CONTINUED)):
        return "before its pods start; some of its fields also later"
    if covers(CONTINUED, path):
        return "before its pods start; on this machine between two runs of `sluice run`"
    return "before its pods start"


def _inner(schema: dict[str, Any]) -> dict[str, Any]:
    items: dict[str, Any] = schema.get("items", {})
    return items if "properties" in items else schema


def _brackets(schema: dict[str, Any]) -> str:
    return "[]" if "properties" in schema.get("items", {}) else ""


def _plain(schema: dict[str, Any]) -> str:
    return " ".join(schema.get("description", "").split())


def _rule(rule: dict[str, str]) -> str:
    place = rule.get("fieldPath", "").removeprefix(".")
    return f"{place}: {rule['message']}" if place else rule["message"]


def _item(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
