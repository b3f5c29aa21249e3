"""Passes over a job that does not run: it ends, has ended, or is suspended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sluice.api import LastFailure, RLJob, RLJobStatus
from sluice_operator.plan.decide.drain import drain, to_drain
from sluice_operator.plan.decide.gangs import (
    Step,
    exit_times,
    living,
    present_facts,
)
from sluice_operator.plan.decide.scale_down import retired_gangs
from sluice_operator.plan.decide.success import has_succeeded
from sluice_operator.plan.decide.ttl import expiry
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.constants import (
    NOT_ADMITTED,
    STARTUP_DEADLINE,
    STOPPED,
    SUCCEEDED,
    SUSPENDED,
)
from sluice_operator.plan.facts.model import Deletion, Gang, Observed, Plan
from sluice_operator.plan.manifests import podgroup
from sluice_operator.plan.manifests.optional_objects import unwanted_extras
from sluice_operator.plan.report import events
from sluice_operator.plan.report.blocked import blocked
from sluice_operator.plan.report.conditions import Finding
from sluice_operator.plan.report.status import (
    assembled,
    last_failure,
    roles,
)


def finish(
    job: RLJob,
    status: RLJobStatus,
    observed: Observed,
    now: datetime,
    ending: Finding,
    steps: Sequence[Step],
) -> Plan:
    """The job ends: its terminal condition is written first, then what still runs is stopped."""
    word = f"has {ending.type.lower()}"
    findings = [ending, Finding("Running", "False", STOPPED.name, STOPPED.text(state=word))]
    failure = last_failure(status, steps) if ending.type == "Failed" else status.last_failure
    if ending.reason == STARTUP_DEADLINE.name and (
        trouble := blocked(observed.pods, observed.warned)
    ):
        failure = trouble.failure(now)
    ends = {"completion_time": clock.text(now), "queued_time": None}
    new = _stopped_status(job, status, observed, findings, now, failure, **ends)
    return Plan(
        new, (), drain(to_drain(observed.pods), now), events.of_change(observed.status, new)
    )


def finished(job: RLJob, status: RLJobStatus, observed: Observed, now: datetime) -> Plan:
    """Terminal states are for ever: drain what is left, and delete the job when its
    time has come.
    """
    new = _stopped_status(job, status, observed, [], now, status.last_failure)
    delete = (
        drain(to_drain(observed.pods), now)
        + unwanted_extras(job, observed)
        + podgroup.ends(observed.pods)
    )
    moment = expiry(job.spec, status)
    if moment is None or delete or to_drain(observed.pods):
        return Plan(
            new,
            (),
            delete,
            events.of_deletions(delete),
            clock.until_next(exit_times(observed.pods), now),
        )
    if now < moment:
        return Plan(new, requeue_after=clock.until_next([moment], now))
    return Plan(new, (), (Deletion("RLJob", job.metadata.name),), (events.expired(job),))


def suspended(job: RLJob, status: RLJobStatus, observed: Observed, now: datetime) -> Plan:
    """All pods go; storage, attempts and counts stay.

    The clocks of the deadlines start again on resume.
    """
    status = status.model_copy(
        update={"pod_group": podgroup.following(job, status, observed), "queued_time": None}
    )
    known, observed = observed.pods, living(observed)
    trainer = Gang("trainer", 0, job.spec.trainer.nodes)
    facts = present_facts(trainer, status.gang("trainer", 0), observed.pods, now)
    if has_succeeded(trainer, facts):
        done = Finding("Succeeded", "True", SUCCEEDED.name, SUCCEEDED.message)
        return finish(job, status, observed, now, done, [])
    findings = [
        Finding("Suspended", "True", SUSPENDED.name, SUSPENDED.message),
        Finding("Running", "False", STOPPED.name, STOPPED.text(state="is suspended")),
        Finding("Admitted", "False", NOT_ADMITTED.name, NOT_ADMITTED.text(state="is suspended")),
    ]
    retired = retired_gangs(status, [], observed.pods, now)
    new = assembled(
        job,
        status,
        roles(status, [], retired),
        findings,
        now,
        start_time=None,
        rollout_replicas=job.spec.replicas,
    )
    delete = drain(observed.pods, now) + unwanted_extras(job, observed) + podgroup.ends(known)
    emitted = events.of_change(observed.status, new) + events.of_deletions(delete)
    return Plan(new, (), delete, emitted, clock.until_next(exit_times(observed.pods), now))


def _stopped_status(
    job: RLJob,
    status: RLJobStatus,
    observed: Observed,
    findings: list[Finding],
    now: datetime,
    failure: LastFailure | None,
    **update: Any,
) -> RLJobStatus:
    """Status of a job that has ended: nothing is desired any more;
    gangs and counts stay as they are.
    """
    running = {
        name: sum(podstate.is_ready(pod) for pod in observed.pods if podstate.role(pod) == name)
        for name in ("rendezvous", "buffer", "rollout", "trainer")
    }
    role_list = [
        role.model_copy(update={"desired": 0, "ready": running[role.name]}) for role in status.roles
    ]
    return assembled(job, status, role_list, findings, now, last_failure=failure, **update)
