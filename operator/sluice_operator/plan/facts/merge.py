"""Strategic merge of pod templates, with the merge keys of Kubernetes' API types.

Maps are merged key by key; `null` removes a key. Lists of named entries are merged by name.
Containers are merged field by field. Entries of env, ports, volumes and the like are replaced as a
whole: merging `value` into `valueFrom`, or one volume source into another, makes an object that the
API server refuses. `$patch: delete` in an entry removes the entry of that name. Every other list
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
    """Return `patch` merged over `base`; neither is changed.

    field: the name of both in their parent, which decides how lists are merged.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        return _merge_maps(base, patch)
    if isinstance(base, list) and isinstance(patch, list) and field in _MERGED_BY | _REPLACED_BY:
        return _merge_named(base, patch, field)
    return patch


def fitting(
    template: dict[str, Any], pod: dict[str, Any], own_names: Collection[str]
) -> dict[str, Any]:
    """Return the template without entries for containers that this pod does not have.

    Pods of one role may differ: only the first pod of an engine has a worker. An entry adds a
    container only if it has an image and is not named like one of sluice's containers.

    Parameters
    ----------
    template
        The job's template for the role.
    pod
        The pod to which it is applied.
    own_names
        Names of sluice's containers in pods of this role.

    """
    spec = dict(template.get("spec") or {})
    for field in _MERGED_BY:
        present = {container["name"] for container in pod["spec"].get(field, ())}
        entries = [
            entry
            for entry in spec.pop(field, None) or ()
            if entry.get("name") in present
            or ("image" in entry and entry.get("name") not in own_names)
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
