"""Strategic merge of a pod template over ours: what `kubectl` users expect of a template, in one small function.

Maps are merged key by key; `null` removes a key. Lists of named things are merged by name: containers field by field;
env, ports, volumes and mounts whole entry by whole entry, because merging `value` into `valueFrom`, or one volume
source into another, makes an object that the API server refuses. Every other list is replaced.
"""

from __future__ import annotations

from typing import Any

_MERGED_BY = {"containers": "name", "initContainers": "name"}
_REPLACED_BY = {
    "env": "name",
    "ports": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """`patch` over `base`; neither is changed. field: the name under which both stand in their parent."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return _merge_maps(base, patch)
    if isinstance(base, list) and isinstance(patch, list) and field in _MERGED_BY | _REPLACED_BY:
        return _merge_named(base, patch, field)
    return patch


def _merge_maps(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    merged = {key: value for key, value in base.items() if not (key in patch and patch[key] is None)}
    for key, value in patch.items():
        if value is not None:
            merged[key] = merge(merged[key], value, key) if key in merged else value
    return merged


def _merge_named(base: list[Any], patch: list[Any], field: str) -> list[Any]:
    key = (_MERGED_BY | _REPLACED_BY)[field]
    merged = {entry.get(key): entry for entry in base}
    for entry in patch:
        name = entry.get(key)
        merged[name] = _merge_maps(merged[name], entry) if field in _MERGED_BY and name in merged else entry
    return list(merged.values())
