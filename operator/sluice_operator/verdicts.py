"""Judgements about a job that are made before it can be planned, with their reasons."""

from __future__ import annotations

from datetime import datetime

from pydantic import ValidationError

from sluice.api import RLJobStatus
from sluice_operator.plan import Event, KubeObject, clock
from sluice_operator.plan.conditions import Finding, state_word, updated

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
        "state": state_word(conditions),
        "completion_time": status.completion_time or clock.text(now),
    }
    return status.model_copy(update=update), Event("Warning", INVALID_SPEC, message)


def is_mended(status: RLJobStatus | None) -> bool:
    """The spec was invalid, and has been corrected before anything was started: the one way back from Failed."""
    failed = status.condition("Failed") if status else None
    return status is not None and failed is not None and failed.reason == INVALID_SPEC and status.start_time is None


def runs_first(before: RLJobStatus | None, now: RLJobStatus) -> bool:
    """It runs, and neither did before nor has trained a step yet: a restart or a resume is no start."""
    ran = before is not None and (before.is_true("Running") or before.last_progress_time is not None)
    return now.is_true("Running") and not ran
