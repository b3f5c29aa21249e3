"""Judgements about a job that are made before it can be planned, with their reasons."""

from __future__ import annotations

from datetime import datetime

from pydantic import ValidationError

from sluice.api import RLJobStatus
from sluice_operator.plan import Event, KubeObject, clock
from sluice_operator.plan.constants import RECONCILE_FAILED, UNBEGUN
from sluice_operator.plan.report.conditions import Finding, summary, updated

INVALID_SPEC = "InvalidSpec"
REFUSED = "SpecChangeRefused"
NOT_APPLIED = "ApplyFailed"


def invalid(stored: KubeObject, message: str, now: datetime) -> tuple[RLJobStatus, Event]:
    """The status of a job whose spec breaks a rule, with what to tell of it."""
    try:
        status = RLJobStatus.model_validate(stored.get("status") or {})
    except ValidationError:
        status = RLJobStatus()
    generation = stored["metadata"].get("generation", 1)
    conditions = updated(status, [Finding("Failed", "True", INVALID_SPEC, message)], generation, now)
    update = {
        "observed_generation": generation,
        "conditions": conditions,
        **summary(conditions),
        "completion_time": status.completion_time or clock.text(now),
    }
    return status.model_copy(update=update), Event("Warning", INVALID_SPEC, message)


def hampered(stored: KubeObject, note: str, earlier: str, now: datetime) -> RLJobStatus | None:
    """The status of a job of which a pass met an error of the operator's own; all else stays as the last pass left it.

    note: of the error; earlier: the one that the status may have already. None: there is no status that can be read,
    and what stands there (attempts, the start) must not be lost.
    """
    try:
        status = RLJobStatus.model_validate(stored.get("status") or {})
    except ValidationError:
        return None
    before = status.condition("Running")
    text = before.message.removesuffix(f"; {earlier}").removesuffix(f"; {note}") if before else UNBEGUN
    finding = Finding("Running", before.status if before else "Unknown", RECONCILE_FAILED.name, f"{text}; {note}")
    conditions = updated(status, [finding], stored["metadata"].get("generation", 1), now)
    words = summary(conditions)
    return status.model_copy(update={"conditions": conditions, **words, "state": status.state or words["state"]})


def is_mended(status: RLJobStatus | None) -> bool:
    """The spec was invalid, and has been corrected before anything was started: the one way back from Failed."""
    failed = status.condition("Failed") if status else None
    return status is not None and failed is not None and failed.reason == INVALID_SPEC and status.start_time is None


def runs_first(before: RLJobStatus | None, now: RLJobStatus) -> bool:
    """It runs, and neither did before nor has trained a step yet: a restart or a resume is no start."""
    ran = before is not None and (before.is_true("Running") or before.last_progress_time is not None)
    return now.is_true("Running") and not ran
