"""Kubernetes events: what a person reads in `kubectl describe`.

An event belongs to a decision that changes the status, and is emitted only after that status has
been written. So a pass over an unchanged cluster emits no events.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.api import RLJob, RLJobStatus
from sluice_operator.plan.decide.gangs import GangPlan
from sluice_operator.plan.decide.restart import Restart
from sluice_operator.plan.facts.constants import (
    DEFAULTED,
    EXPIRED,
    FORCE_DELETE_AFTER,
    FORCED,
    GANG_DISRUPTED,
    GANG_FAILED,
    HUNG,
    RESUMED,
    SCALED,
    SUSPENDED,
)
from sluice_operator.plan.facts.job_defaults import defaulted_fields
from sluice_operator.plan.facts.model import Deletion, Event, Observed
from sluice_operator.plan.facts.names import config_name
from sluice_operator.plan.facts.podstate import headline
from sluice_operator.plan.report import remedies
from sluice_operator.plan.report.conditions import ConditionUpdate, hopeless


def of_gangs(plans: Sequence[GangPlan], status: RLJobStatus) -> tuple[Event, ...]:
    """Return the events of gangs that restart. status: the one that this pass writes."""
    return tuple(
        _restart_event(plan, plan.decision, status)
        for plan in plans
        if isinstance(plan.decision, Restart)
    )


def _restart_event(plan: GangPlan, decision: Restart, status: RLJobStatus) -> Event:
    gang, attempt = plan.gang.name, plan.status.attempt
    failure = decision.failure
    if failure is None:
        cause = remedies.with_remedy(decision.disruption, remedies.QUEUEING)
        text = GANG_DISRUPTED.text(gang=gang, what=cause, attempt=attempt)
        return Event("Normal", GANG_DISRUPTED.name, text)
    text = GANG_FAILED.text(
        gang=gang, headline=headline(failure), attempt=attempt, delay=f"{decision.delay:g}"
    )
    if status.last_failure and status.last_failure.pod == failure.pod:
        text = "; ".join(filter(None, (text, hopeless(status))))
    reason = HUNG if failure.reason == HUNG.name else GANG_FAILED
    return Event("Warning", reason.name, text)


def of_change(before: RLJobStatus | None, after: RLJobStatus) -> tuple[Event, ...]:
    """Return the events of the job as a whole: its end, suspension and scaling."""
    old = before or RLJobStatus()
    events = []
    for kind, type_ in (("Succeeded", "Normal"), ("Failed", "Warning")):
        condition = after.condition(kind)  # type: ignore[arg-type]
        if condition and condition.status == "True" and not old.is_true(kind):  # type: ignore[arg-type]
            events.append(Event(type_, condition.reason, condition.message))  # type: ignore[arg-type]
    if after.is_true("Suspended") and not old.is_true("Suspended"):
        events.append(Event("Normal", SUSPENDED.name, SUSPENDED.message))
    if old.is_true("Suspended") and not after.is_true("Suspended"):
        events.append(Event("Normal", RESUMED.name, RESUMED.message))
    if old.rollout_replicas is not None and old.rollout_replicas != after.rollout_replicas:
        text = SCALED.text(old=old.rollout_replicas, new=after.rollout_replicas)
        events.append(Event("Normal", SCALED.name, text))
    return tuple(events)


def of_deletions(deletions: Sequence[Deletion]) -> tuple[Event, ...]:
    """Return the events of pods that are deleted by force."""
    forced = [deletion for deletion in deletions if deletion.kind == "Pod" and deletion.grace == 0]
    return tuple(
        Event("Warning", FORCED.name, FORCED.text(pod=pod.name, seconds=FORCE_DELETE_AFTER))
        for pod in forced
    )


def of_defaults(job: RLJob, observed: Observed) -> tuple[Event, ...]:
    """Return an event about the cluster's defaults, once, when the job starts."""
    has_started = ("ConfigMap", config_name(job)) in observed.objects
    if has_started or not (fields := defaulted_fields(job, observed.defaults)):
        return ()
    return (Event("Normal", DEFAULTED.name, DEFAULTED.text(fields="; ".join(fields))),)


def expired(job: RLJob) -> Event:
    return Event("Normal", EXPIRED.name, EXPIRED.text(seconds=job.spec.ttl_seconds_after_finished))


def resumed_condition() -> ConditionUpdate:
    return ConditionUpdate("Suspended", "False", RESUMED.name, RESUMED.message)
