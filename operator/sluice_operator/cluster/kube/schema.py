"""Writes down which fields Kubernetes' own objects have, for those who have no client of it:
`make kubernetes-fields`.

The client's models are read, not used: a laptop checks templates with what is written here
(sluice/api/schema/kubernetes_fields.py).
"""

from __future__ import annotations

import json
import re
from typing import Any

from kubernetes.client import models

ROOTS = ("PodTemplateSpec", "Volume", "NetworkPolicyPeer")
_QUANTITIES = (
    "EmptyDirVolumeSource.sizeLimit",
    "PodSpec.overhead",
    "ResourceFieldSelector.divisor",
    "ResourceRequirements.limits",
    "ResourceRequirements.requests",
    "VolumeResourceRequirements.limits",
    "VolumeResourceRequirements.requests",
)
"""The models call them texts; API servers take numbers too."""
_SIMPLE = {
    "str": "text",
    "datetime": "text",
    "int": "integer",
    "bool": "boolean",
    "object": "any",
}


def fields() -> dict[str, dict[str, str]]:
    """Type -> field -> type of the field: `text`, `PodSpec`, `[Container]` for a list, `{text}` for
    a map.
    """
    known: dict[str, dict[str, str]] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name not in known:
            known[name] = _fields_of(name)
            waiting += [
                each.strip("[]{}")
                for each in known[name].values()
                if each.strip("[]{}")[0].isupper()
            ]
    known["VolumeSource"] = {
        field: kind for field, kind in known["Volume"].items() if field != "name"
    }
    return dict(sorted(known.items()))


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
