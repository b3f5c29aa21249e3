"""API reference in Markdown, generated from the models.

`make reference` writes it to docs/reference/rljob.md and docs/reference/rlenginepool.md.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from sluice.api.job import RLJobSpec
from sluice.api.pool import IMMUTABLE, RLEnginePoolSpec, RLEnginePoolStatus
from sluice.api.schema.crd import schema_of
from sluice.api.schema.mutability import CONTINUED, MUTABLE
from sluice.api.status import RLJobStatus

_HEAD = """\
# {kind} `sluice.dev/v1alpha1`

Generated from `sluice.api` by `make reference`.
`kubectl explain {name}.spec` says the same in a cluster.
"""


def job() -> str:
    """Return Markdown with a table for every object of an RLJob's spec and status."""
    continued = ", ".join(f"`{path}`" for path in CONTINUED)
    free = ", ".join(f"`{path}`" for path in MUTABLE)
    changes = [
        f"After pods were started only these fields of `spec` may change: {free}.\n",
        f"A run on this machine (`sluice run`) may also resume with another {continued}.\n",
    ]
    return _page("RLJob", changes, RLJobSpec, RLJobStatus)


def pool() -> str:
    """Return the same for an RLEnginePool."""
    fixed = ", ".join(f"`{path}`" for path in IMMUTABLE)
    changes = [
        f"These fields of `spec` may never change: {fixed}. A change of `replicas` starts or ends "
        "engines; any other change restarts the engines, one after another.\n"
    ]
    return _page("RLEnginePool", changes, RLEnginePoolSpec, RLEnginePoolStatus)


def _page(kind: str, changes: list[str], spec: type[BaseModel], status: type[BaseModel]) -> str:
    parts = [_HEAD.format(kind=kind, name=kind.lower()), *changes]
    for name, model in (("spec", spec), ("status", status)):
        parts += _sections(name, schema_of(model))
    return "\n".join(parts)


def _sections(path: str, schema: dict[str, Any]) -> list[str]:
    required = schema.get("required", [])
    fields = schema["properties"]
    rows = [_row(name, child, name in required) for name, child in fields.items()]
    lines = [f"## `{path}`\n"]
    if "description" in schema:
        lines.append(" ".join(schema["description"].split()) + "\n")
    lines += ["| field | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    rules = [_rule(rule) for rule in schema.get("x-kubernetes-validations", [])]
    lines += ["Rules:\n", *rules, ""] if rules else []
    for name, child in fields.items():
        items = child.get("items", {})
        if "properties" in child and not is_free(child):
            lines += _sections(f"{path}.{name}", child)
        elif "properties" in items:
            lines += _sections(f"{path}.{name}[]", items)
    return lines


def is_free(schema: dict[str, Any]) -> bool:
    """Return whether an object takes any field. Its schema names only fields that rules read."""
    return bool(schema.get("x-kubernetes-preserve-unknown-fields"))


def fields_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of an object; empty if it takes any field."""
    return {} if is_free(schema) else schema.get("properties", {})


def _rule(rule: dict[str, str]) -> str:
    field = rule.get("fieldPath", "").removeprefix(".")
    return f"- `{field}`: {rule['message']}" if field else f"- {rule['message']}"


def _row(name: str, schema: dict[str, Any], required: bool) -> str:
    default = "**required**" if required else _default(schema)
    meaning = " ".join(schema.get("description", "").split()).replace("|", "\\|")
    kind = type_of(schema, choice="`{}`", between=" \\| ")
    return f"| `{name}` | {kind} | {default} | {meaning} |"


def _default(schema: dict[str, Any]) -> str:
    """Default of a field. Defaults of an object are shown with its fields."""
    value = schema.get("default")
    return "" if value is None or isinstance(value, dict) else f"`{json.dumps(value)}`"


def type_of(schema: dict[str, Any], *, choice: str = "{}", between: str = " | ") -> str:
    """Return the type of a field in a word or two, or the values of a choice."""
    if "enum" in schema:
        return between.join(choice.format(value) for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if schema.get("type") == "array":
        return f"list of {type_of(schema['items'], choice=choice, between=between)}"
    return str(schema.get("type", "any"))
