"""Prints the fields of Kubernetes' own types as JSON, for `make kubernetes-fields`.

The result is read from the models of the Kubernetes client. A laptop, which may not have the
client, checks templates with it (sluice/api/schema/kubernetes_fields.py).
"""

from __future__ import annotations

import json
import re
from typing import Any

from kubernetes.client import models

ROOTS = ("PodTemplateSpec", "Volume", "NetworkPolicyPeer")
# Quantities, which the models call texts. API servers accept numbers as well.
_QUANTITIES = (
    "EmptyDirVolumeSource.sizeLimit",
    "PodSpec.overhead",
    "ResourceFieldSelector.divisor",
    "ResourceRequirements.limits",
    "ResourceRequirements.requests",
    "VolumeResourceRequirements.limits",
    "VolumeResourceRequirements.requests",
)

_SIMPLE = {
    "str": "text",
    "datetime": "text",
    "int": "integer",
    "bool": "boolean",
    "object": "any",
}


def fields() -> dict[str, dict[str, str]]:
    """Return the types of all fields, by type and field.

    A type is for example `text`, `PodSpec`, `[Container]` for a list or `{text}` for a map.
    """
    types: dict[str, dict[str, str]] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name not in types:
            types[name] = _fields_of(name)
            referenced = [kind.strip("[]{}") for kind in types[name].values()]
            waiting += [kind for kind in referenced if kind[0].isupper()]
    types["VolumeSource"] = {
        field: kind for field, kind in types["Volume"].items() if field != "name"
    }
    return dict(sorted(types.items()))


def _fields_of(name: str) -> dict[str, str]:
    model: Any = getattr(models, f"V1{name}", None) or getattr(models, name)
    attributes: dict[str, str] = model.attribute_map
    return {
        field: _type(f"{name}.{field}", model.openapi_types[python])
        for python, field in attributes.items()
    }


def _type(field: str, text: str) -> str:
    if match := re.fullmatch(r"List\[(.+)\]", text):
        return f"[{_type(field, match[1])}]"
    if match := re.fullmatch(r"Dict\[str, (.+)\]", text):
        return f"{{{_type(field, match[1])}}}"
    if text in _SIMPLE:
        return "quantity" if field in _QUANTITIES else _SIMPLE[text]
    return text.removeprefix("V1")


if __name__ == "__main__":
    print(json.dumps(fields(), indent=1, sort_keys=True))
