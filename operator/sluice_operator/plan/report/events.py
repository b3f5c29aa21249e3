"""Kubernetes events: what a person wants to read about in `kubectl describe`. Emitted only after
the status write.

Each comes from a decision that changes the status, so an unchanged world emits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.api import RLJob, RLJobStatus
from sluice_operator.plan.decide.gangs import Step
from sluice_operator.plan.decide.restart import Restart
from sluice_operator.plan.defaults import filled_in
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
from sluice_operator.plan.facts.model import Deletion, Event, Observed
from sluice_operator.plan.facts.names import config_name
from sluice_operator.plan.facts.podstate import headline
from sluice_operator.plan.report import remedies
from sluice_operator.plan.report.conditions import Finding, hopeless


def of_steps(steps: Sequence[Step], status: RLJobStatus) -> tuple[Event, ...]:
    """status: the one that is written with them."""
    return tuple(
        _of_restart(step, step.decision, status)
        for step in steps
        if isinstance(step.decision, Restart)
    )


def _of_restart(step: Step, decision: Restart, status: RLJobStatus) -> Event:
    attempt = step.status.attempt
    if decision.failure is None:
        what = remedies.with_cure(decision.disruption, remedies.OF_QUEUES)
        text = GANG_DISRUPTED.text(gang=step.gang.name, what=what, attempt=attempt)
        return Event("Normal", GANG_DISRUPTED.name, text)
    text = GANG_FAILED.text(
        gang=step.gang.name,
        headline=headline(decision.failure),
        attempt=attempt,
        delay=f"{decision.delay:g}",
    )
    if status.last_failure and status.last_failure.pod == decision.failure.pod:
        text = "; ".join(filter(None, (text, hopeless(status))))
    return Event(
        "Warning", HUNG.name if decision.failure.reason == HUNG.name else GANG_FAILED.name, text
    )


def of_change(before: RLJobStatus | None, after: RLJobStatus) -> tuple[Event, ...]:
    """Events of the job as a whole: the end, suspension, scaling."""
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
    """Only of pods that are removed by force."""
    forced = [deletion for deletion in deletions if deletion.kind == "Pod" and deletion.grace == 0]
    return tuple(
        Event("Warning", FORCED.name, FORCED.text(pod=pod.name, seconds=FORCE_DELETE_AFTER))
        for pod in forced
    )


def of_defaults(job: RLJob, observed: Observed) -> tuple[Event, ...]:
    """Once, when the job starts: what it gets that its spec does not say."""
    if ("ConfigMap", config_name(job)) in observed.objects or not (
        fields := filled_in(job, observed.defaults)
    ):
        return ()
    return (Event("Normal", DEFAULTED.name, DEFAULTED.text(fields="; ".join(fields))),)


def expired(job: RLJob) -> Event:
    return Event("Normal", EXPIRED.name, EXPIRED.text(seconds=job.spec.ttl_seconds_after_finished))


def resumed_finding() -> Finding:
    return Finding("Suspended", "False", RESUMED.name, RESUMED.message)
