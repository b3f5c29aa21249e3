"""Decisions of time alone: the job ran too long, never started, or hangs."""

from __future__ import annotations

from datetime import datetime, timedelta

from sluice.api import GangStatus, LastFailure, RLJobSpec, RLJobStatus
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.constants import (
    DEADLINE_EXCEEDED,
    HUNG,
    QUEUE_TIMEOUT,
    STARTUP_DEADLINE,
)
from sluice_operator.plan.facts.model import GangFacts


def job_deadline(
    spec: RLJobSpec, status: RLJobStatus, now: datetime, detail: str = ""
) -> tuple[str, str] | None:
    """(reason, message) where the job has to fail; None: it may go on.

    Both clocks start again on resume.

    detail: what the job is waiting for, in words. A trainer that restarts may rewind to step 0;
    that is no start of the job, so the first step ever counts.
    """
    start = clock.parse_optional(status.start_time)
    if start is None:
        return None
    active, startup = spec.active_deadline_seconds, spec.startup_deadline_seconds
    if active is not None and now >= start + timedelta(seconds=active):
        return DEADLINE_EXCEEDED.name, DEADLINE_EXCEEDED.text(seconds=active)
    if startup and not status.last_progress_time and now >= start + timedelta(seconds=startup):
        text = STARTUP_DEADLINE.text(seconds=startup, detail=f": {detail}" if detail else "")
        return STARTUP_DEADLINE.name, text
    return None


def queue_timeout(
    spec: RLJobSpec, status: RLJobStatus, now: datetime, cause: str
) -> tuple[str, str] | None:
    """(reason, message) where a queue has held the job for too long; None: it may wait. cause: the
    queue's words.
    """
    due = queue_due(spec, status)
    if due is None or now < due:
        return None
    detail = f": {cause}" if cause else ""
    return QUEUE_TIMEOUT.name, QUEUE_TIMEOUT.text(seconds=spec.queue_timeout_seconds, detail=detail)


def queue_due(spec: RLJobSpec, status: RLJobStatus) -> datetime | None:
    """When a job that waits in a queue has waited too long."""
    since = clock.parse_optional(status.queued_time)
    if since is None or spec.queue_timeout_seconds is None:
        return None
    return since + timedelta(seconds=spec.queue_timeout_seconds)


def progress_due(
    spec: RLJobSpec, status: RLJobStatus, trainer: GangStatus, facts: GangFacts, size: int
) -> datetime | None:
    """When the trainer counts as hung; None while it cannot be judged.

    The clock runs only while all trainer pods run, and from the start of the present attempt:
    waiting in a queue, or the step that a predecessor made, is no fault of this attempt.
    """
    if spec.progress_deadline_seconds is None or facts.running < size or facts.started is None:
        return None
    marks = (
        facts.started,
        clock.parse_optional(status.last_progress_time),
        clock.parse_optional(status.start_time),
    )
    return max(mark for mark in marks if mark) + timedelta(seconds=spec.progress_deadline_seconds)


def hang(
    due: datetime | None, status: RLJobStatus, spec: RLJobSpec, pod: str, now: datetime
) -> LastFailure | None:
    """A hang of the trainer, as a failure of its first pod."""
    if due is None or now < due:
        return None
    text = HUNG.text(seconds=spec.progress_deadline_seconds, step=status.step)
    return LastFailure(
        role="trainer",
        pod=pod,
        container="trainer",
        reason=HUNG.name,
        message=text,
        time=clock.text(now),
    )


def upcoming(spec: RLJobSpec, status: RLJobStatus, due: datetime | None) -> list[datetime]:
    """Moments at which one of the above may change its mind."""
    start = clock.parse_optional(status.start_time)
    moments = [moment for moment in (due, queue_due(spec, status)) if moment]
    if start and spec.active_deadline_seconds is not None:
        moments.append(start + timedelta(seconds=spec.active_deadline_seconds))
    if start and spec.startup_deadline_seconds and not status.last_progress_time:
        moments.append(start + timedelta(seconds=spec.startup_deadline_seconds))
    return moments
