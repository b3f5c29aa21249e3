"""Explanations of single fields: `sluice explain trainer.steps`, `rlenginepool.maxAdapters`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from functools import cache
from typing import Any

from sluice.api import pool
from sluice.api.job import RLJobSpec
from sluice.api.pool import RLEnginePoolSpec, RLEnginePoolStatus
from sluice.api.schema.base import Model
from sluice.api.schema.crd import schema_of
from sluice.api.schema.load import ManifestError
from sluice.api.schema.mutability import CONTINUED, MUTABLE, covers
from sluice.api.schema.reference import fields_of, type_of
from sluice.api.schema.renamed_fields import RENAMED
from sluice.api.schema.suggestions import suggestion
from sluice.api.status import RLJobStatus

ROOTS: dict[str, type[Model]] = {"spec": RLJobSpec, "status": RLJobStatus}
_POOL = pool.KIND.lower()
# Paths of a pool's fields begin with its kind, as in `kubectl explain`.
_POOL_ROOTS: dict[str, type[Model]] = {
    f"{_POOL}.spec": RLEnginePoolSpec,
    f"{_POOL}.status": RLEnginePoolStatus,
}
# A schema takes a tenth of a second, and a search goes through it once for each field it finds.
_schema_of = cache(schema_of)
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
    """A field and what a manifest may set it to.

    field: its path, such as `spec.data.prompts[].path`. default: None if there is no default.
    changes: when it may change. rules: what is refused. children: its fields, without theirs.
    """

    field: str
    type: str
    meaning: str
    required: bool = False
    default: Any = None
    limits: dict[str, Any] = attribute(default_factory=dict)
    changes: str = ""
    rules: tuple[str, ...] = ()
    children: tuple[ExplainedField, ...] = ()

    @property
    def name(self) -> str:
        return self.field.rpartition(".")[2].removesuffix("[]")

    def facts(self) -> dict[str, Any]:
        """Return the fields of `-o json`."""
        return {
            "field": self.field,
            "type": self.type,
            "required": self.required,
            "default": self.default,
            "limits": self.limits,
            "meaning": self.meaning,
            "changes": self.changes,
            "rules": list(self.rules),
            "fields": [
                {
                    "name": child.name,
                    "type": child.type,
                    "required": child.required,
                    "default": child.default,
                    "meaning": child.meaning,
                }
                for child in self.children
            ],
        }

    def text(self) -> str:
        """Return the text for people: type and default, the meaning, rules and fields."""
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
        width = max((len(child.name) for child in self.children), default=0)
        for child in self.children:
            yield from child.lines(f"{child.name:<{width}}")

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of the field in a list of fields."""
        default = f", default {json.dumps(self.default)}" if self.default is not None else ""
        yield f"  {name}  {self.type}{', required' if self.required else default}"
        yield from textwrap.wrap(
            self.meaning, _WIDTH, initial_indent="    ", subsequent_indent="    "
        )


@dataclass(frozen=True, slots=True)
class FoundFields:
    """Several fields of the same name in different places."""

    name: str
    fields: tuple[ExplainedField, ...]

    def facts(self) -> list[dict[str, Any]]:
        """Return the fields of `-o json`."""
        return [field.facts() for field in self.fields]

    def text(self) -> str:
        """Return the text for people: each path with its type, default and meaning."""
        lines = (line for field in self.fields for line in field.lines(field.field))
        return "\n".join([f"{self.name} is a field in {len(self.fields)} places:", *lines])


def find(text: str) -> ExplainedField | FoundFields:
    """Return the field that a path names, or all fields whose paths end so: `lr`, `trainer.lr`.

    Fields of an RLEnginePool are looked for if an RLJob has none.

    Raises ManifestError if no field does.
    """
    try:
        return explained(text)
    except ManifestError:
        fields = _ending_so(text, ROOTS) or _ending_so(text, _POOL_ROOTS)
        if not fields:
            raise
    return fields[0] if len(fields) == 1 else FoundFields(text, tuple(fields))


def _ending_so(text: str, roots: Mapping[str, type[Model]]) -> list[ExplainedField]:
    *within, name = _parts(text) or [""]
    return [
        explained(path)
        for path in dict.fromkeys(_paths(roots))
        if (parts := path.split("."))[-1] == name and _in_order(within, parts)
    ]


def _in_order(words: Sequence[str], parts: Sequence[str]) -> bool:
    rest = iter(parts)
    return all(word in rest for word in words)


def _paths(roots: Mapping[str, type[Model]]) -> Iterator[str]:
    """Yield the paths of all fields, without brackets."""

    def below(path: str, schema: dict[str, Any]) -> Iterator[str]:
        for name, child in fields_of(_inner(schema)).items():
            yield f"{path}.{name}"
            yield from below(f"{path}.{name}", child)

    for root, model in roots.items():
        yield from below(root, _schema_of(model))


def _parts(text: str) -> list[str]:
    return [part for part in re.sub(r"\[\w*\]", "", text).split(".") if part]


def explained(text: str) -> ExplainedField:
    """Return the field that a dotted path names. `spec.` and indices may be left out.

    Raises ManifestError, with a suggestion, if the field does not exist.
    """
    parts = _parts(text)
    prefix = ""
    if parts and parts[0].lower() in (_POOL, pool.PLURAL):
        prefix, parts = f"{_POOL}.", parts[1:]
    if not parts or parts[0] not in ROOTS:
        parts.insert(0, "spec")
    path = prefix + parts[0]
    schema, required = _schema_of((ROOTS | _POOL_ROOTS)[path]), True
    for part in parts[1:]:
        holder = _inner(schema)
        properties = fields_of(holder)
        if part not in properties:
            old = f"{path.removeprefix('spec').strip('.')}.{part}".strip(".")
            if renamed := next((field for field in RENAMED if field.old == old), None):
                raise ManifestError(renamed.sentence(None))
            hint = (
                suggestion(part, properties)
                if properties
                else f"{path} has no fields that sluice knows"
            )
            raise ManifestError(f"{path}.{part}: no such field; {hint}")
        required = part in holder.get("required", [])
        schema, path = properties[part], f"{path}.{part}{_brackets(properties[part])}"
    return _field(path, schema, required=required and len(parts) > 1)


def completions(incomplete: str) -> list[str]:
    """Return the paths that begin with `incomplete`, one level deep, for shell completion."""
    parent, dot, start = incomplete.rpartition(".")
    try:
        names = [child.name for child in explained(parent or "spec").children]
    except ManifestError:
        return []
    top = [] if parent else [*ROOTS, _POOL]
    return [f"{parent}{dot}{name}" for name in (*names, *top) if name.startswith(start)]


def _field(path: str, schema: dict[str, Any], *, required: bool) -> ExplainedField:
    inner = _inner(schema)
    return replace(
        _short(path, schema, required=required),
        meaning=_plain(schema) or _plain(inner),
        limits=_limits(schema),
        changes=_changes(path),
        rules=tuple(_rule(rule) for rule in inner.get("x-kubernetes-validations", [])),
        children=tuple(
            _short(f"{path}.{name}", child, required=name in inner.get("required", []))
            for name, child in fields_of(inner).items()
        ),
    )


def _short(path: str, schema: dict[str, Any], *, required: bool) -> ExplainedField:
    default = schema.get("default")
    return ExplainedField(
        field=path,
        type=type_of(schema),
        meaning=_plain(schema),
        required=required,
        default=None if isinstance(default, dict) else default,
    )


def _limits(schema: dict[str, Any]) -> dict[str, Any]:
    """Limits of a field by their names in JSON Schema, without those of int32."""
    # An OpenAPI schema has a flag `exclusiveMinimum: true` next to the minimum.
    limits = {name: schema[name] for name in _LIMITS if name in schema}
    for edge in ("Minimum", "Maximum"):
        if limits.get(f"exclusive{edge}") is True:
            limits[f"exclusive{edge}"] = limits.pop(edge.lower())
    return {name: value for name, value in limits.items() if value != _INT32}


def _changes(path: str) -> str:
    """Say when a field of a spec may change; empty for other fields."""
    if path.startswith(f"{_POOL}.spec."):
        fixed = covers(pool.IMMUTABLE, path.removeprefix(f"{_POOL}.spec."))
        return "never" if fixed else "at any time"
    if not path.startswith("spec."):
        return ""
    path = path.removeprefix("spec.")
    if covers(MUTABLE, path):
        return "at any time"
    if any(field.startswith(f"{path}.") for field in (*MUTABLE, *CONTINUED)):
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
