"""Names of the containers in pods of jobs and pools, by which pod templates change them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sluice.api.schema.annotations import Location
from sluice.api.schema.kubernetes_fields import Fault

# Container names by role. Not every pod has all: only the first pod of an engine has a worker.
CONTAINERS: Mapping[str, Sequence[str]] = {
    "trainer": ("trainer",),
    "rollout": ("engine", "worker", "openenv"),
    "buffer": ("buffer",),
    "rendezvous": ("rendezvous",),
    "episode": ("episode", "sidecar"),
    "verifier": ("verifier", "sidecar"),
    "engine": ("engine",),
}
INIT_CONTAINERS: Mapping[str, Sequence[str]] = {
    "trainer": ("fetch",),
    "rollout": ("fetch", "plugin"),
    "buffer": ("fetch", "rows"),
    "engine": ("fetch", "plugin"),
}
# Names by field of a pod spec, then by role.
NAMES = {"containers": CONTAINERS, "initContainers": INIT_CONTAINERS}
# Role -> path of its template in a spec.
_PLACES: Mapping[str, Sequence[str]] = {
    "trainer": ("trainer",),
    "rollout": ("rollout",),
    "buffer": ("buffer",),
    "episode": ("rollout", "environment"),
    "verifier": ("rollout", "environment", "verifier"),
    # Of an RLEnginePool; an RLJob has no template there.
    "engine": (),
}

# Location of a pod template in a spec, the roles of its pods, and the template.
_Template = tuple[Location, Sequence[str], Any]


def faults_of_containers(spec: Mapping[str, Any]) -> list[Fault]:
    """Return entries of pod templates that no pod has: unknown names without an image."""
    templates = list(_templates(spec))
    return [
        fault
        for field in NAMES
        for template in templates
        for fault in _of(field, template, templates)
    ]


def _of(field: str, template: _Template, templates: Sequence[_Template]) -> Iterator[Fault]:
    location, roles, _ = template
    names = [name for role in roles for name in NAMES[field].get(role, ())]
    theirs = {
        entry["name"]
        for _, their_roles, other in templates
        if set(roles) & set(their_roles)
        for entry in _entries(other, field)
        if "image" in entry and "name" in entry
    }
    for index, entry in enumerate(_entries(template[2], field)):
        name = entry.get("name")
        if "image" in entry or "$patch" in entry or name in theirs or name in names:
            continue
        yield Fault(
            (*location, "spec", field, index, "name"),
            f"no container of {' or '.join(roles)} pods is named {name!r} "
            f"({', '.join(names) or 'they have none'}); give it an image to add one",
        )


def _entries(template: Any, field: str) -> list[Mapping[str, Any]]:
    spec = template.get("spec") if isinstance(template, Mapping) else None
    entries = spec.get(field) if isinstance(spec, Mapping) else None
    return [entry for entry in entries or [] if isinstance(entry, Mapping)]


def _templates(spec: Mapping[str, Any]) -> Iterator[_Template]:
    for role, place in _PLACES.items():
        yield ("spec", *place, "template"), [role], _at(spec, *place, "template")
    for index, override in enumerate(spec.get("podTemplateOverrides") or []):
        at = ("spec", "podTemplateOverrides", index, "template")
        yield at, override["roles"], override["template"]


def _at(document: Any, *keys: str) -> Any:
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document
