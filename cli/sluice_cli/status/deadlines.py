"""The next thing that time alone does to a job, by the planner's own rules."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sluice.api import RLJob, RLJobStatus
from sluice_operator.plan import KubeObject, is_finished
from sluice_operator.plan.decide.deadlines import progress_due, queue_due
from sluice_operator.plan.decide.gang_facts import gang_facts
from sluice_operator.plan.decide.gangs import of_gang
from sluice_operator.plan.decide.ttl import expiry
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.model import Gang

Moment = tuple[datetime, str]


def upcoming(
    job: RLJob, status: RLJobStatus, pods: Sequence[KubeObject], now: datetime
) -> list[Moment]:
    """Moments to come, and what happens then; the next one first."""
    if is_finished(status):
        end = expiry(job.spec, status)
        moments = [(end, "the finished job is deleted (ttlSecondsAfterFinished)")] if end else []
    else:
        moments = [*_deadlines(job, status), *_hang(job, status, pods, now), *_retries(status)]
    return sorted(each for each in moments if each[0] > now)


def _deadlines(job: RLJob, status: RLJobStatus) -> list[Moment]:
    start, spec, moments = clock.parse_optional(status.start_time), job.spec, list[Moment]()
    if due := queue_due(spec, status):
        moments.append(
            (due, "the job fails, if its queue has not admitted it (queueTimeoutSeconds)")
        )
    if start and spec.active_deadline_seconds is not None:
        text = "the job fails, if it still runs (activeDeadlineSeconds)"
        moments.append((start + timedelta(seconds=spec.active_deadline_seconds), text))
    if start and spec.startup_deadline_seconds and not status.last_progress_time:
        text = "the job fails, without a first step (startupDeadlineSeconds)"
        moments.append((start + timedelta(seconds=spec.startup_deadline_seconds), text))
    return moments


def _hang(
    job: RLJob, status: RLJobStatus, pods: Sequence[KubeObject], now: datetime
) -> list[Moment]:
    gang, known = Gang("trainer", 0, job.spec.trainer.nodes), status.gang("trainer", 0)
    if known is None:
        return []
    members = [pod for pod in of_gang(gang, pods) if podstate.attempt(pod) == known.attempt]
    due = progress_due(job.spec, status, known, gang_facts(gang, members, now), gang.size)
    return (
        [(due, "the trainer restarts, without another step (progressDeadlineSeconds)")]
        if due
        else []
    )


def _retries(status: RLJobStatus) -> list[Moment]:
    return [
        (clock.parse(gang.retry_time), f"{role.name}-{gang.replica} starts attempt {gang.attempt}")
        for role in status.roles
        for gang in role.gangs
        if gang.retry_time
    ]
