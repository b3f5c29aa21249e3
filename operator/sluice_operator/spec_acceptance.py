"""Turns a stored object into the job that is reconciled, or into a status that says why not.

- Unknown fields are dropped, as an API server prunes them: an object that was stored under another
  version of the CRD must not fail because of them.
- A spec that breaks a rule fails the job, unless it has started.
- Once pods were started for a spec, only some fields may change. After any other change the job
  goes on with the spec that it was started with, and reports the change as refused.
- Templates are checked only before the start, so that a job that has run goes on.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from pydantic import ValidationError

from sluice.api import KIND, ManifestError, RLEnginePool, RLJob, RLJobStatus
from sluice.api.schema.load import check_kubernetes_fields
from sluice.api.schema.mutability import MUTABLE, differences
from sluice.api.schema.problems import describe
from sluice.api.schema.renamed_fields import migrate_spec, old_fields
from sluice_operator.plan import Event
from sluice_operator.plan.facts import clock, names
from sluice_operator.plan.facts.constants import RECONCILE_FAILED, UNBEGUN
from sluice_operator.plan.facts.model import KubeObject
from sluice_operator.plan.manifests import downloads
from sluice_operator.plan.manifests.volume_paths import spelled
from sluice_operator.plan.report.conditions import ConditionUpdate, summary, updated

INVALID_SPEC = "InvalidSpec"
REFUSED = "SpecChangeRefused"
NOT_APPLIED = "ApplyFailed"

M = TypeVar("M", RLJob, RLEnginePool)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The job that is reconciled."""

    job: RLJob
    refused: str = ""  # the part of the stored spec that is not followed, and why


def accept(stored: KubeObject, config: KubeObject | None) -> Accepted:
    """Decide which spec to reconcile.

    Parameters
    ----------
    stored
        The RLJob as it is stored.
    config
        The ConfigMap that the job's pods were started with; None if no pod was started.

    Raises
    ------
    ManifestError
        The spec of a job that has not started is invalid.

    """
    started_spec = _started_with(config)
    if started_spec is None:
        if old := old_fields(stored.get("spec")):
            raise ManifestError("; ".join(field.sentence() for field in old))
        job = parse(stored)
        check_kubernetes_fields(stored, stored, _name(stored))
        return Accepted(job)
    try:
        changed = parse(stored)
    except ManifestError as error:
        return _unchanged(stored, started_spec, str(error))
    changes = differences(_full(parse({**stored, "spec": started_spec})), _full(changed))
    if not changes:
        return Accepted(changed)
    return _unchanged(stored, started_spec, f"cannot be changed: {'; '.join(changes)}")


def parse(stored: KubeObject) -> RLJob:
    """Return the object as a job, without fields that this version does not know.

    Renamed fields are read as well, because an earlier version may have started the job.

    Raises
    ------
    ManifestError
        A field is invalid.

    """
    document = copy.deepcopy(stored)
    migrate_spec(document.get("spec"))
    return _parsed(RLJob, document)


def parse_pool(stored: KubeObject) -> RLEnginePool:
    """Return the object as a pool, likewise. Raises ManifestError."""
    return _parsed(RLEnginePool, copy.deepcopy(stored))


def _parsed(model: type[M], document: KubeObject) -> M:
    """Return the document as a model; unknown fields are removed from the document."""
    while True:
        try:
            return model.model_validate(document)
        except ValidationError as error:
            unknown = [
                problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"
            ]
            removed = [_remove(document, location) for location in unknown]
            if not removed or not all(removed):
                name = _name(document, model.__name__)
                raise ManifestError(describe(error, document, name, model=model)) from error


def invalid(stored: KubeObject, message: str, now: datetime) -> tuple[RLJobStatus, Event]:
    """Return the status and the event of a job whose spec breaks a rule."""
    try:
        status = RLJobStatus.model_validate(stored.get("status") or {})
    except ValidationError:
        status = RLJobStatus()
    generation = stored["metadata"].get("generation", 1)
    conditions = updated(
        status, [ConditionUpdate("Failed", "True", INVALID_SPEC, message)], generation, now
    )
    update = {
        "observed_generation": generation,
        "conditions": conditions,
        **summary(conditions),
        "completion_time": status.completion_time or clock.text(now),
    }
    return status.model_copy(update=update), Event("Warning", INVALID_SPEC, message)


def with_internal_error(
    stored: KubeObject, note: str, earlier: str, now: datetime
) -> RLJobStatus | None:
    """Add an internal error of the operator to a job's status; all else stays unchanged.

    Parameters
    ----------
    stored
        The RLJob as it is stored.
    note
        The error in words.
    earlier
        The note of an earlier error, which is replaced.
    now
        The time of this pass.

    Returns
    -------
    The status, or None if the stored one cannot be read. Then it must not be overwritten, because
    its attempt numbers and start time would be lost.

    """
    try:
        status = RLJobStatus.model_validate(stored.get("status") or {})
    except ValidationError:
        return None
    before = status.condition("Running")
    text = (
        before.message.removesuffix(f"; {earlier}").removesuffix(f"; {note}") if before else UNBEGUN
    )
    finding = ConditionUpdate(
        "Running", before.status if before else "Unknown", RECONCILE_FAILED.name, f"{text}; {note}"
    )
    conditions = updated(status, [finding], stored["metadata"].get("generation", 1), now)
    words = summary(conditions)
    return status.model_copy(
        update={"conditions": conditions, **words, "state": status.state or words["state"]}
    )


def is_corrected(status: RLJobStatus | None) -> bool:
    """Return True if an accepted job has failed because its spec was invalid and never started.

    Its spec has been corrected since, so it leaves Failed.
    """
    failed = status.condition("Failed") if status else None
    return (
        status is not None
        and failed is not None
        and failed.reason == INVALID_SPEC
        and status.start_time is None
    )


def is_first_run(before: RLJobStatus | None, after: RLJobStatus) -> bool:
    """Return True if the job starts to run now and has never trained a step.

    A restart or a resume does not count.
    """
    ran = before is not None and (
        before.is_true("Running") or before.last_progress_time is not None
    )
    return after.is_true("Running") and not ran


def _unchanged(stored: KubeObject, started_spec: dict[str, Any], why: str) -> Accepted:
    """Return the job as it was started, with the changes that are allowed."""
    spec = copy.deepcopy(started_spec)
    for path in MUTABLE:
        _copy(stored["spec"], spec, path.split("."))
    try:
        return Accepted(parse({**stored, "spec": spec}), why)
    except ManifestError:
        return Accepted(parse({**stored, "spec": started_spec}), why)


def _started_with(config: KubeObject | None) -> dict[str, Any] | None:
    """Return the spec in a job's ConfigMap, with URIs, in which paths are those inside pods."""
    data = (config or {}).get("data") or {}
    if names.JOB_FILE not in data:
        return None
    spec = json.loads(data[names.JOB_FILE])["spec"]
    return downloads.with_uris(spec, json.loads(data.get(names.URIS_FILE, "{}")))


def _full(job: RLJob) -> dict[str, Any]:
    """Return the spec with all defaults and with paths in one spelling, for comparisons.

    A new default does not count as a change.
    """
    return spelled(job.spec.model_dump(mode="json", by_alias=True))


def _copy(source: dict[str, Any], target: dict[str, Any], path: Sequence[str]) -> None:
    """Copy the field at `path` from source to target; remove it if the source lacks it."""
    name, rest = path[0], path[1:]
    if rest:
        _copy(source.get(name) or {}, target.setdefault(name, {}), rest)
    elif name in source:
        target[name] = source[name]
    else:
        target.pop(name, None)


def _remove(document: Any, location: Sequence[int | str]) -> bool:
    """Remove the field at `location`. Return False if there is none."""
    for part in location[:-1]:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return False
    return isinstance(document, dict) and document.pop(location[-1], document) is not document


def _name(stored: KubeObject, kind: str = KIND) -> str:
    return f"{kind} {stored['metadata']['namespace']}/{stored['metadata']['name']}"
