"""Fields that may change while a job lives: for the operator, and as rules of the API server.

A job has started once its status names an attempt of a gang: the operator writes that before it
makes the first pod. Until then a spec may be mended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined

from sluice.api.base import Model, nested
from sluice.api.cel import escaped

MUTABLE = (
    "suspend",
    "rollout.replicas",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
    "progressDeadlineSeconds",
    "queueTimeoutSeconds",
    "ttlSecondsAfterFinished",
    "failurePolicy",
    "networkPolicy",
    "podDisruptionBudget",
)
"""Fields of the spec that may change while a job lives."""
NEVER = ("managedBy",)
"""Fields that may not even change before the start: two controllers would take themselves for the
job's own."""
_STARTED = (
    "has(oldSelf.status) && has(oldSelf.status.roles) && oldSelf.status.roles.exists(r, r.attempt "
    "> 0)"
)


def transitions(spec: type[Model]) -> list[dict[str, str]]:
    """CEL rules over the whole object, one for each part of its spec that may not change, whole
    groups where it can.
    """
    return [_transition(path, always_there) for path, always_there in _frozen(spec, "")]


def _transition(path: str, always_there: bool) -> dict[str, str]:
    """Optional values (`.?`) would be shorter: of their sizes the server assumes the worst, and
    refuses the rule.
    """
    parent, _, name = f"spec.{path}".rpartition(".")
    new, old = (f"{root}.{parent}.{escaped(name)}" for root in ("self", "oldSelf"))
    same = (
        f"{new} == {old}"
        if always_there
        else f"(has({new}) ? has({old}) && {new} == {old} : !has({old}))"
    )
    always = path in NEVER
    return {
        "rule": same if always else f"{same} || !({_STARTED})",
        "message": "cannot be changed" if always else "cannot be changed once pods were started",
        "fieldPath": f".spec.{path}",
        "reason": "FieldValueForbidden",
    }


def _frozen(model: type[Model], path: str) -> Iterator[tuple[str, bool]]:
    """Parts of the spec, the largest that hold nothing that may change. True: the server fills it
    in if need be.
    """
    for field, info in model.model_fields.items():
        name = info.alias or field
        at = f"{path}.{name}" if path else name
        if at in MUTABLE:
            continue
        inner = nested(info)
        if inner is not None and any(each.startswith(f"{at}.") for each in MUTABLE):
            yield from _frozen(inner, at)
        else:
            there = inner is not None or info.default not in (None, PydanticUndefined)
            yield at, there or info.is_required()


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two specs differ, but for what may change: `spec.trainer.steps: 10 -> 20`."""
    if path in MUTABLE or old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        parts = [
            differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            for key in keys
        ]
        return [change for part in parts for change in part]
    return [f"spec.{path}: {old!r} -> {new!r}"]
