"""Kubernetes objects in a spec: pod templates, volume sources, peers of a network policy.

An API server drops or refuses unknown fields of them long after the manifest was written. Their
fields are known here as the operator's Kubernetes client has them (`make kubernetes-fields`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from sluice.api.schema.annotations import Location, annotated_fields, places
from sluice.api.schema.base import FreeForm, Model
from sluice.api.schema.suggestions import suggestion

_CALLED = {
    "PodTemplateSpec": "a pod template",
    "PodSpec": "a pod's spec",
    "Container": "a container",
    "VolumeSource": "a volume",
    "NetworkPolicyPeer": "a network policy's peer",
}
_SIMPLE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", lambda value: isinstance(value, str)),
    "integer": (
        "a whole number",
        lambda value: isinstance(value, int) and not isinstance(value, bool),
    ),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "quantity": (
        "a quantity",
        lambda value: isinstance(value, str | int | float) and not isinstance(value, bool),
    ),
    "any": ("anything", lambda value: True),
}
# Directive of a strategic merge in an entry of a list: `$patch: delete`.
_DIRECTIVE = "$patch"


@dataclass(frozen=True, slots=True)
class OfKubernetes:
    """Annotation of a type: the field holds an object of this Kubernetes type."""

    type: str


PodTemplate = Annotated[FreeForm, OfKubernetes("PodTemplateSpec")]
VolumeSource = Annotated[FreeForm, OfKubernetes("VolumeSource")]
NetworkPolicyPeer = Annotated[FreeForm, OfKubernetes("NetworkPolicyPeer")]


@cache
def kubernetes_fields() -> dict[str, dict[str, str]]:
    """Return Kubernetes type -> field -> type of the field.

    Types of fields are `text`, `PodSpec`, `[Container]` for a list, `{text}` for a map.
    """
    fields: dict[str, dict[str, str]] = json.loads(
        (Path(__file__).parent / "kubernetes_fields.json").read_text()
    )
    return fields


@dataclass(frozen=True, slots=True)
class Fault:
    """A part of a spec that Kubernetes would refuse or drop."""

    location: Location
    text: str


def faults_of(model: type[Model], spec: Mapping[str, Any]) -> list[Fault]:
    """Return the faults of Kubernetes objects in a spec, in the order of the model's fields."""
    return [
        fault
        for parts, mark in annotated_fields(model, OfKubernetes)
        for place in places(spec, parts)
        for fault in _check(place.holder[place.key], mark.type, place.location)
    ]


def _check(value: Any, kind: str, at: Location) -> Iterator[Fault]:
    # `null` is valid anywhere: a merge removes the field.
    if value is None:
        return
    if kind in _SIMPLE:
        yield from _check_simple(value, kind, at)
    elif kind.startswith("["):
        yield from _check_list(value, kind[1:-1], at)
    elif not isinstance(value, Mapping):
        yield Fault(at, f"expected an object, found {value!r}")
    elif kind.startswith("{"):
        for key, inner in value.items():
            yield from _check(inner, kind[1:-1], (*at, str(key)))
    else:
        yield from _check_object(value, kind, at)


def _check_simple(value: Any, kind: str, at: Location) -> Iterator[Fault]:
    expected, fits = _SIMPLE[kind]
    if not fits(value):
        cure = (
            "; put it in quotes" if kind == "text" and isinstance(value, bool | int | float) else ""
        )
        yield Fault(at, f"expected {expected}, found {value!r}{cure}")


def _check_list(value: Any, kind: str, at: Location) -> Iterator[Fault]:
    if not isinstance(value, list):
        yield Fault(at, f"expected a list, found {value!r}")
        return
    for index, item in enumerate(value):
        entry = (
            {name: field for name, field in item.items() if name != _DIRECTIVE}
            if isinstance(item, Mapping)
            else item
        )
        yield from _check(entry, kind, (*at, index))


def _check_object(value: Mapping[str, Any], kind: str, at: Location) -> Iterator[Fault]:
    types = kubernetes_fields()[kind]
    for name, inner in value.items():
        if name in types:
            yield from _check(inner, types[name], (*at, name))
        else:
            text = f"no such field of {_CALLED.get(kind, kind)}; {suggestion(str(name), types)}"
            yield Fault((*at, str(name)), text)
