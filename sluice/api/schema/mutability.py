"""Fields that may change while a job lives: for the operator, and as rules of the API server.

A job has started once its status names an attempt of a gang: the operator writes that before it
makes the first pod. Until then a spec may be mended.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from sluice.api.schema.rules import escaped, nested_model

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
CONTINUED = (
    "trainer.steps",
    "trainer.epochs",
    "trainer.optimizer.lr",
    "trainer.optimizer.minLr",
    "trainer.optimizer.schedule",
    "trainer.optimizer.warmupSteps",
    "trainer.optimizer.decaySteps",
    "trainer.optimizer.clipGrad",
    "trainer.optimizer.expAvgDtype",
    "trainer.optimizer.expAvgSqDtype",
    "trainer.cpuOffload",
    "trainer.cpuOffloadFraction",
    "trainer.maxTokensPerGpu",
    "trainer.balance",
    "trainer.recompute",
    "trainer.recomputeModules",
    "algorithm.loss.clip",
    "algorithm.entropyCoef",
    "checkpoint.everySteps",
    "checkpoint.keep",
    "evaluation.everySteps",
    "evaluation.passAtK",
    "rollout.concurrency",
    "rollout.engineArgs",
    "rollout.functionSeconds",
    "rollout.limits",
    "reward.timeoutSeconds",
    "reward.sandbox",
    "debug.dumpRollouts",
    "debug.profile",
    "trainer.resources",
    "rollout.resources",
    "rollout.workerResources",
)
"""Fields that a run of this machine may have anew when it goes on: all its processes start again,
and none of these gives another meaning to what it has stored."""
NEVER = ("managedBy",)
"""Fields that may not even change before the start: two controllers would take themselves for the
job's own."""
_STARTED = (
    "has(oldSelf.status) && has(oldSelf.status.roles) && oldSelf.status.roles.exists(r, r.attempt "
    "> 0)"
)


def transitions(spec: type[BaseModel]) -> list[dict[str, str]]:
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


def _frozen(model: type[BaseModel], path: str) -> Iterator[tuple[str, bool]]:
    """Parts of the spec, the largest that hold nothing that may change. True: the server fills it
    in if need be.
    """
    for field, info in model.model_fields.items():
        name = info.alias or field
        at = f"{path}.{name}" if path else name
        if at in MUTABLE:
            continue
        inner = nested_model(info)
        if inner is not None and any(each.startswith(f"{at}.") for each in MUTABLE):
            yield from _frozen(inner, at)
        else:
            there = inner is not None or info.default not in (None, PydanticUndefined)
            yield at, there or info.is_required()


@dataclass(frozen=True, slots=True)
class Change:
    """One field that two specs have differently. path: without `spec.`."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"spec.{self.path}: {self.old!r} -> {self.new!r}"


def changes(old: Any, new: Any, path: str = "") -> Iterator[Change]:
    """Where two specs differ, field by field; what may change at any time is left out."""
    if old == new or path in MUTABLE:
        return
    before, after = old or {}, new or {}
    if not (isinstance(before, dict) and isinstance(after, dict) and (before or after)):
        yield Change(path, old, new)
        return
    for key in sorted(before.keys() | after.keys()):
        at = f"{path}.{key}" if path else key
        yield from changes(before.get(key), after.get(key), at)


def differences(old: Any, new: Any) -> list[str]:
    """The same in words: `spec.trainer.steps: 10 -> 20`."""
    return [str(change) for change in changes(old, new)]


def covers(paths: Container[str], path: str) -> bool:
    """True where a field is one of these, or lies in one of them."""
    parts = path.replace("[]", "").split(".")
    return any(".".join(parts[:end]) in paths for end in range(1, len(parts) + 1))
