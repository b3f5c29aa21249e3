"""Fields that may change after a job has started, for the operator and as rules of the API server.

A job has started once its status names an attempt of a gang: the operator writes that before it
creates the first pod. Until then every field may be corrected.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from sluice.api.schema.rules import escaped, nested_model

# Fields of the spec that may change while a job runs.
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
# Fields that may differ when a run on this machine resumes: all its processes start again, and
# none of the fields changes the meaning of stored data.
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
    "rollout.speculative",
    "reward.timeoutSeconds",
    "reward.sandbox",
    "debug.dumpRollouts",
    "debug.profile",
    "trainer.resources",
    "rollout.resources",
    "rollout.workerResources",
)
# Fields that may not change even before the start: two controllers would both claim the job.
NEVER = ("managedBy",)
_STARTED = (
    "has(oldSelf.status) && has(oldSelf.status.roles) && oldSelf.status.roles.exists(r, r.attempt "
    "> 0)"
)


def transitions(spec: type[BaseModel]) -> list[dict[str, str]]:
    """Return CEL rules over the whole object, one for each part of the spec that may not change.

    A part is a whole group if no field of it may change.
    """
    return [_transition(path, always_there) for path, always_there in _frozen(spec, "")]


def constants(sentences: Mapping[str, str]) -> list[dict[str, str]]:
    """Return CEL rules over the whole object of fields that may never change.

    sentences: why, by the field of spec. The fields are never absent on a server.
    """
    return [
        {
            "rule": f"self.spec.{path} == oldSelf.spec.{path}",
            "message": sentence,
            "fieldPath": f".spec.{path}",
            "reason": "FieldValueForbidden",
        }
        for path, sentence in sentences.items()
    ]


def _transition(path: str, always_there: bool) -> dict[str, str]:
    # Optional values (`.?`) would be shorter, but the server assumes the worst of their size and
    # refuses the rule.
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
    """Yield the largest parts of the spec in which no field may change.

    Each comes with True if the part is never absent on a server.
    """
    for field, info in model.model_fields.items():
        name = info.alias or field
        at = f"{path}.{name}" if path else name
        if at in MUTABLE:
            continue
        inner = nested_model(info)
        if inner is not None and any(path.startswith(f"{at}.") for path in MUTABLE):
            yield from _frozen(inner, at)
        else:
            there = inner is not None or info.default not in (None, PydanticUndefined)
            yield at, there or info.is_required()


@dataclass(frozen=True, slots=True)
class Change:
    """A field that differs between two specs. path: without `spec.`."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"spec.{self.path}: {self.old!r} -> {self.new!r}"


def changes(old: Any, new: Any, path: str = "") -> Iterator[Change]:
    """Yield the differences of two specs, field by field, without fields that may always change."""
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
    """Return the differences as text: `spec.trainer.steps: 10 -> 20`."""
    return [str(change) for change in changes(old, new)]


def covers(paths: Container[str], path: str) -> bool:
    """Return whether a field is one of `paths` or within one of them."""
    parts = path.replace("[]", "").split(".")
    return any(".".join(parts[:end]) in paths for end in range(1, len(parts) + 1))
