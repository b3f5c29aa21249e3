"""What may change while a job lives."""

from __future__ import annotations

from typing import Any

MUTABLE = (
    "suspend",
    "rollout.replicas",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
    "progressDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "failurePolicy",
    "networkPolicy",
    "podDisruptionBudget",
)
"""Fields of the spec that may change while a job lives."""


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two specs differ, but for what may change: `spec.trainer.steps: 10 -> 20`."""
    if path in MUTABLE or old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        parts = [differences(old.get(key), new.get(key), f"{path}.{key}" if path else key) for key in keys]
        return [change for part in parts for change in part]
    return [f"spec.{path}: {old!r} -> {new!r}"]
