"""Passes over a job that does not run: it ends, has ended, or is suspended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.api import ROLES, LastFailure, RLJobStatus
from sluice_operator.plan.decide.deadlines import expiry
from sluice_operator.plan.decide.deletion import drain, exit_times, to_drain
from sluice_operator.plan.decide.gangs import GangPlan, has_succeeded, present_facts
from sluice_operator.plan.decide.pod_groups import finished_groups, next_group
from sluice_operator.plan.decide.scale_down import retired_gangs
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.constants import (
    NOT_ADMITTED,
    STARTUP_DEADLINE,
    STOPPED,
    SUCCEEDED,
    SUSPENDED,
)
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import Deletion, Gang, Plan
from sluice_operator.plan.manifests.optional_objects import unwanted_extras
from sluice_operator.plan.report import events
from sluice_operator.plan.report.blocked import blocked
from sluice_operator.plan.report.conditions import ConditionUpdate
from sluice_operator.plan.report.fetching import model_fetched
from sluice_operator.plan.report.status import assembled, last_failure, roles


def finish(current: JobPass, ending: ConditionUpdate, plans: Sequence[GangPlan]) -> Plan:
    """End the job: write its terminal condition, and stop what still runs."""
    state = f"has {ending.type.lower()}"
    updates = [
        ending,
        *model_fetched(current),
        ConditionUpdate("Running", "False", STOPPED.name, STOPPED.text(state=state)),
    ]
    failure = current.status.last_failure
    if ending.type == "Failed":
        failure = last_failure(current.status, plans)
    if ending.reason == STARTUP_DEADLINE.name and (
        obstacle := blocked(current.pods, current.observed.warned)
    ):
        failure = obstacle.failure(current.now)
    times = {"completion_time": clock.text(current.now), "queued_time": None}
    status = _stopped_status(current, updates, failure, **times)
    delete = drain(to_drain(current.pods), current.now)
    return Plan(status, (), delete, events.of_change(current.observed.status, status))


def finished(current: JobPass) -> Plan:
    """Drain a job that has ended, and delete it after its time to live."""
    observed, now = current.observed, current.now
    status = _stopped_status(current, [], current.status.last_failure)
    delete = (
        drain(to_drain(observed.pods), now)
        + unwanted_extras(current.job, observed)
        + finished_groups(observed.pods)
    )
    expires = expiry(current.spec, current.status)
    if expires is None or delete or to_drain(observed.pods):
        requeue_after = clock.until_next(exit_times(observed.pods), now)
        return Plan(status, (), delete, events.of_deletions(delete), requeue_after)
    if now < expires:
        return Plan(status, requeue_after=clock.until_next([expires], now))
    job = current.job
    return Plan(status, (), (Deletion("RLJob", job.metadata.name),), (events.expired(job),))


def suspended(current: JobPass) -> Plan:
    """Delete all pods of a suspended job; its storage, attempt numbers and counters stay.

    The clocks of its deadlines start again on resume.
    """
    all_pods = current.pods
    current = current.updated(pod_group=next_group(current), queued_time=None)
    current = current.without_departed_pods()
    job, status, now = current.job, current.status, current.now

    trainer = Gang("trainer", 0, current.spec.trainer.nodes)
    facts = present_facts(trainer, status.gang("trainer", 0), current.pods, now)
    if has_succeeded(trainer, facts):
        ending = ConditionUpdate("Succeeded", "True", SUCCEEDED.name, SUCCEEDED.message)
        return finish(current, ending, [])

    state = "is suspended"
    updates = [
        ConditionUpdate("Suspended", "True", SUSPENDED.name, SUSPENDED.message),
        ConditionUpdate("Running", "False", STOPPED.name, STOPPED.text(state=state)),
        ConditionUpdate("Admitted", "False", NOT_ADMITTED.name, NOT_ADMITTED.text(state=state)),
    ]
    retired = retired_gangs(status, [], current.pods, now)
    new = assembled(
        current,
        roles(status, [], retired),
        updates,
        start_time=None,
        rollout_replicas=current.spec.replicas,
    )
    delete = (
        drain(current.pods, now)
        + unwanted_extras(job, current.observed)
        + finished_groups(all_pods)
    )
    emitted = events.of_change(current.observed.status, new) + events.of_deletions(delete)
    return Plan(new, (), delete, emitted, clock.until_next(exit_times(current.pods), now))


def _stopped_status(
    current: JobPass,
    updates: Sequence[ConditionUpdate],
    failure: LastFailure | None,
    **fields: Any,
) -> RLJobStatus:
    """Return the status of a job that has ended: no pod is desired; gangs and counters stay."""
    ready = {
        name: sum(podstate.is_ready(pod) for pod in current.pods if podstate.role(pod) == name)
        for name in ROLES
    }
    role_list = [
        role.model_copy(update={"desired": 0, "ready": ready[role.name]})
        for role in current.status.roles
    ]
    return assembled(current, role_list, updates, last_failure=failure, **fields)
