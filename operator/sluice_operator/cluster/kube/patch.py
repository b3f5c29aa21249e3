"""The smallest merge patch (RFC 7386) between two versions of an object's part."""

from __future__ import annotations

from typing import Any


def merge_patch(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The merge patch that turns `old` into `new`; empty: they are equal. Lists are replaced as a
    whole; null removes a field.
    """
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = merge_patch(before, value)
            if inner:
                patch[name] = inner
        elif name not in old or before != value:
            patch[name] = value
    return patch


def without_empty(value: Any) -> Any:
    """The value without its empty texts: a status leaves them out, and Kubernetes 1.20 takes them
    for null.
    """
    if isinstance(value, dict):
        return {name: without_empty(each) for name, each in value.items() if each != ""}
    if isinstance(value, list):
        return [without_empty(each) for each in value]
    return value
