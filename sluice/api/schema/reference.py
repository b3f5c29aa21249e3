"""The API reference for people, written from the models: `make reference` puts it into
docs/reference/rljob.md.
"""

from __future__ import annotations

import json
from typing import Any

from sluice.api.job import RLJobSpec
from sluice.api.schema.crd import schema_of
from sluice.api.schema.mutability import CONTINUED, MUTABLE
from sluice.api.status import RLJobStatus

_HEAD = """\
# RLJob `sluice.dev/v1alpha1`

Generated from `sluice.api` by `make reference`.
`kubectl explain rljob.spec` says the same in a cluster.
"""


def reference() -> str:
    """Markdown: a table for every object of spec and status."""
    free = ", ".join(f"`{path}`" for path in MUTABLE)
    parts = [_HEAD, f"Once pods were started only these fields of `spec` may change: {free}.\n"]
    continued = ", ".join(f"`{path}`" for path in CONTINUED)
    parts.append(f"A run of this machine may go on (`sluice run`) also with another {continued}.\n")
    for name, model in (("spec", RLJobSpec), ("status", RLJobStatus)):
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
    """True if an object takes any field; its schema then names only those that rules look at."""
    return bool(schema.get("x-kubernetes-preserve-unknown-fields"))


def fields_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields of an object; none of one that is free."""
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
    """That of an object stands with its fields."""
    value = schema.get("default")
    return "" if value is None or isinstance(value, dict) else f"`{json.dumps(value)}`"


def type_of(schema: dict[str, Any], *, choice: str = "{}", between: str = " | ") -> str:
    """The type of a field in a word or two; of a choice its values."""
    if "enum" in schema:
        return between.join(choice.format(value) for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if schema.get("type") == "array":
        return f"list of {type_of(schema['items'], choice=choice, between=between)}"
    return str(schema.get("type", "any"))
