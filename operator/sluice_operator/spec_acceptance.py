"""Stored object -> the job that is reconciled, or the status of one that cannot be.

Three things stand between them. Unknown fields are dropped, as an API server prunes them: an object
that was stored under another version of the CRD must not fail for it. A spec that breaks a rule
ends the job, where it has not begun. And once pods were started for a spec only some fields may
change; of any other change the job goes on with what it was started with, and says so. Templates
are checked before the start only: what has run once goes on.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from sluice.api import ManifestError, RLJob, RLJobStatus
from sluice.api.schema.load import check_foreign
from sluice.api.schema.mutability import MUTABLE, differences
from sluice.api.schema.problems import describe
from sluice.api.schema.renamed_fields import migrate_spec, old_fields
from sluice_operator.plan import Event
from sluice_operator.plan.facts import clock, names
from sluice_operator.plan.facts.constants import RECONCILE_FAILED, UNBEGUN
from sluice_operator.plan.facts.model import KubeObject
from sluice_operator.plan.manifests.volume_paths import spelled
from sluice_operator.plan.report.conditions import ConditionUpdate, summary, updated

INVALID_SPEC = "InvalidSpec"
REFUSED = "SpecChangeRefused"
NOT_APPLIED = "ApplyFailed"


@dataclass(frozen=True, slots=True)
class Accepted:
    """refused: what of the stored spec is not followed, and why; empty: all of it is."""

    job: RLJob
    refused: str = ""


def accept(stored: KubeObject, config: KubeObject | None) -> Accepted:
    """config: the ConfigMap that the job's pods were started with; None: none were. ManifestError:
    an invalid spec.
    """
    known = _started_with(config)
    if known is None:
        if old := old_fields(stored.get("spec")):
            raise ManifestError("; ".join(field.sentence() for field in old))
        job = parse(stored)
        check_foreign(stored, stored, _name(stored))
        return Accepted(job)
    try:
        wanted = parse(stored)
    except ManifestError as error:
        return _unchanged(stored, known, str(error))
    changes = differences(_full(parse({**stored, "spec": known})), _full(wanted))
    if not changes:
        return Accepted(wanted)
    return _unchanged(stored, known, f"cannot be changed: {'; '.join(changes)}")


def parse(stored: KubeObject) -> RLJob:
    """The object as a job, without the fields that this version does not know.

    Fields that were renamed since are read too: an earlier version may have started the job.
    """
    document = copy.deepcopy(stored)
    migrate_spec(document.get("spec"))
    while True:
        try:
            return RLJob.model_validate(document)
        except ValidationError as error:
            unknown = [
                problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"
            ]
            removed = [_remove(document, location) for location in unknown]
            if not removed or not all(removed):
                raise ManifestError(describe(error, document, _name(stored))) from error


def invalid(stored: KubeObject, message: str, now: datetime) -> tuple[RLJobStatus, Event]:
    """The status of a job whose spec breaks a rule, with what to tell of it."""
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


def hampered(stored: KubeObject, note: str, earlier: str, now: datetime) -> RLJobStatus | None:
    """The status of a job of which a pass met an error of the operator's own; all else stays as the
    last pass left it.

    note: of the error; earlier: the one that the status may have already. None: there is no status
    that can be read, and what stands there (attempts, the start) must not be lost.
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


def is_mended(status: RLJobStatus | None) -> bool:
    """The spec was invalid, and has been corrected before anything was started: the one way back
    from Failed.
    """
    failed = status.condition("Failed") if status else None
    return (
        status is not None
        and failed is not None
        and failed.reason == INVALID_SPEC
        and status.start_time is None
    )


def runs_first(before: RLJobStatus | None, now: RLJobStatus) -> bool:
    """It runs, and neither did before nor has trained a step yet:
    a restart or a resume is no start.
    """
    ran = before is not None and (
        before.is_true("Running") or before.last_progress_time is not None
    )
    return now.is_true("Running") and not ran


def _unchanged(stored: KubeObject, known: dict[str, Any], why: str) -> Accepted:
    """The job as it was started, with the changes that are allowed."""
    spec = copy.deepcopy(known)
    for path in MUTABLE:
        _copy(stored["spec"], spec, path.split("."))
    try:
        return Accepted(parse({**stored, "spec": spec}), why)
    except ManifestError:
        return Accepted(parse({**stored, "spec": known}), why)


def _started_with(config: KubeObject | None) -> dict[str, Any] | None:
    """The spec in a job's ConfigMap, with paths as pods find them: where they are mounted."""
    text = ((config or {}).get("data") or {}).get(names.JOB_FILE)
    if text is None:
        return None
    spec: dict[str, Any] = json.loads(text)["spec"]
    return spec


def _full(job: RLJob) -> dict[str, Any]:
    """The spec with all defaults filled in, and paths in one spelling: a new default
    is no change.
    """
    return spelled(job.spec.model_dump(mode="json", by_alias=True))


def _copy(source: dict[str, Any], target: dict[str, Any], path: Sequence[str]) -> None:
    """Make the field at `path` the same in both; absent in one, absent in the other."""
    name, rest = path[0], path[1:]
    if rest:
        _copy(source.get(name) or {}, target.setdefault(name, {}), rest)
    elif name in source:
        target[name] = source[name]
    else:
        target.pop(name, None)


def _remove(document: Any, location: Sequence[int | str]) -> bool:
    """Remove what stands there; False: nothing does."""
    for part in location[:-1]:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return False
    return isinstance(document, dict) and document.pop(location[-1], document) is not document


def _name(stored: KubeObject) -> str:
    return f"RLJob {stored['metadata']['namespace']}/{stored['metadata']['name']}"
