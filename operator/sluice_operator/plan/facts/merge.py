"""Strategic merge of a pod template over ours, with the keys that Kubernetes' own API types name
for it.

Maps are merged key by key; `null` removes a key. Lists of named things are merged by name:
containers field by field; env, ports, volumes and the like whole entry by whole entry, because
merging `value` into `valueFrom`, or one volume source into another, makes an object that the API
server refuses. `$patch: delete` in an entry removes the one of that name. Every other list
(tolerations, command, args) is replaced.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_MERGED_BY = {"containers": "name", "initContainers": "name"}
_REPLACED_BY = {
    "env": "name",
    "ports": "containerPort",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "claims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
}


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """`patch` over `base`; neither is changed.

    field: the name under which both stand in their parent.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        return _merge_maps(base, patch)
    if isinstance(base, list) and isinstance(patch, list) and field in _MERGED_BY | _REPLACED_BY:
        return _merge_named(base, patch, field)
    return patch


def fitting(template: dict[str, Any], pod: dict[str, Any], ours: Collection[str]) -> dict[str, Any]:
    """The template without entries for containers that this pod lacks and others have: of an
    engine's pods only the first has a worker.

    An entry without an image changes a container and never adds one; nor does an entry of the name
    of one of `ours`.
    """
    spec = dict(template.get("spec") or {})
    for field in _MERGED_BY:
        present = {container["name"] for container in pod["spec"].get(field, ())}
        entries = [
            entry
            for entry in spec.pop(field, None) or ()
            if entry.get("name") in present or ("image" in entry and entry.get("name") not in ours)
        ]
        if entries:
            spec[field] = entries
    return {**template, "spec": spec}


def _merge_maps(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    merged = {
        key: value for key, value in base.items() if not (key in patch and patch[key] is None)
    }
    for key, value in patch.items():
        if value is not None:
            merged[key] = merge(merged[key], value, key) if key in merged else value
    return merged


def _merge_named(base: list[Any], patch: list[Any], field: str) -> list[Any]:
    key = (_MERGED_BY | _REPLACED_BY)[field]
    merged = {entry.get(key): entry for entry in base}
    for entry in patch:
        name = entry.get(key)
        if entry.get("$patch") == "delete":
            merged.pop(name, None)
            continue
        merged[name] = (
            _merge_maps(merged[name], entry) if field in _MERGED_BY and name in merged else entry
        )
    return list(merged.values())
