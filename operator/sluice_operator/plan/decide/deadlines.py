"""Decisions that depend on time alone: a job ran too long, never started, hangs, or has expired."""

from __future__ import annotations

from datetime import datetime, timedelta

from sluice.api import LastFailure, RLJobSpec, RLJobStatus
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
    """Decide whether the job fails by activeDeadlineSeconds or startupDeadlineSeconds.

    Both clocks start again on resume. The start-up deadline is over with the first step ever: a
    trainer that restarts and rewinds to step 0 does not start the job again.

    Parameters
    ----------
    spec, status
        The job.
    now
        The time of this pass.
    detail
        What the job waits for, in words.

    Returns
    -------
    (reason, message), or None if the job may continue.

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
    """Decide whether the job fails by queueTimeoutSeconds.

    Parameters
    ----------
    spec, status
        The job.
    now
        The time of this pass.
    cause
        Why the job waits, in the queue's words.

    Returns
    -------
    (reason, message), or None if the job may go on waiting.

    """
    due = queue_due(spec, status)
    if due is None or now < due:
        return None
    detail = f": {cause}" if cause else ""
    return QUEUE_TIMEOUT.name, QUEUE_TIMEOUT.text(seconds=spec.queue_timeout_seconds, detail=detail)


def queue_due(spec: RLJobSpec, status: RLJobStatus) -> datetime | None:
    """Return when a job that waits in a queue has waited too long."""
    since = clock.parse_optional(status.queued_time)
    if since is None or spec.queue_timeout_seconds is None:
        return None
    return since + timedelta(seconds=spec.queue_timeout_seconds)


def progress_due(
    spec: RLJobSpec, status: RLJobStatus, facts: GangFacts, size: int
) -> datetime | None:
    """Return when the trainer counts as hung, or None while it cannot be judged.

    The clock runs only while all `size` trainer pods run, and from the start of the present
    attempt: neither time in a queue nor the last step of an earlier attempt counts against it.
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
    """Return a hang of the trainer as a failure of its first pod, or None if it is not hung."""
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
    """Return the times at which one of the decisions above may change."""
    start = clock.parse_optional(status.start_time)
    moments = [moment for moment in (due, queue_due(spec, status)) if moment]
    if start and spec.active_deadline_seconds is not None:
        moments.append(start + timedelta(seconds=spec.active_deadline_seconds))
    if start and spec.startup_deadline_seconds and not status.last_progress_time:
        moments.append(start + timedelta(seconds=spec.startup_deadline_seconds))
    return moments


def expiry(spec: RLJobSpec, status: RLJobStatus) -> datetime | None:
    """Return when a finished job is deleted (ttlSecondsAfterFinished); None if it never is."""
    if spec.ttl_seconds_after_finished is None or status.completion_time is None:
        return None
    return clock.parse(status.completion_time) + timedelta(seconds=spec.ttl_seconds_after_finished)
