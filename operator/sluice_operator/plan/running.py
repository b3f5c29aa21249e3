"""A pass over a job that should run.

`running` is the whole pass; each of its stages is one of the functions below it, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sluice.api import LastFailure, RLJobStatus
from sluice_operator.plan.decide import deadlines
from sluice_operator.plan.decide.deletion import exit_times
from sluice_operator.plan.decide.gangs import (
    GangPlan,
    advance,
    by_gang,
    has_succeeded,
    present_facts,
)
from sluice_operator.plan.decide.pod_groups import (
    finished_groups,
    gangs_to_run,
    give_back_time,
    groups_of,
    job_group,
    job_group_first,
    with_whole_group,
)
from sluice_operator.plan.decide.restart import GiveUp
from sluice_operator.plan.decide.scale_down import retired_gangs
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.constants import QUEUE_LOOK_SECONDS, SUCCEEDED
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import Deletion, Event, Gang, KubeObject, Plan
from sluice_operator.plan.facts.names import checkpoint_name, pod_name
from sluice_operator.plan.manifests.objects import missing_objects
from sluice_operator.plan.manifests.optional_objects import missing_extras, unwanted_extras
from sluice_operator.plan.manifests.pods import missing_pods
from sluice_operator.plan.report import admission, conditions, events
from sluice_operator.plan.report.blocked import failed_to_start
from sluice_operator.plan.report.conditions import ConditionUpdate
from sluice_operator.plan.report.fetching import model_fetched
from sluice_operator.plan.report.status import assembled, last_failure, roles
from sluice_operator.plan.stopping import finish


def running(current: JobPass) -> Plan:
    """Advance every gang of the job, or end the job."""
    all_pods = current.pods

    # Settle the group in which the job is admitted. A new group means new attempts.
    current = with_whole_group(current)
    current = current.updated(pod_group=job_group(current)).without_departed_pods()

    # Decide about each gang: wait, create its pods, restart it or give up.
    gangs = gangs_to_run(current)
    hang_time = _hang_time(current)
    plans = _advance_gangs(current, gangs, hang_time)

    # Stop the clocks while a queue holds the job, and note the newest failure.
    current = _with_clocks(current, plans)

    # End the job if it has succeeded, if a gang gave up or if a deadline has passed.
    ending = _ending(current, plans)
    if ending is not None:
        return finish(current, ending, plans)

    # Retire gangs that are no longer wanted, and report.
    retired = retired_gangs(current.status, gangs, current.pods, current.now)
    reported = current.with_status(_status(current, plans, retired))

    # Collect the objects to create and to delete, the events, and the time of the next pass.
    create, delete = _changes(current, plans, retired, all_pods)
    return Plan(
        reported.status,
        create,
        delete,
        _events(reported, plans, delete),
        clock.until_next(_next_moments(reported, plans, hang_time), current.now),
    )


def _hang_time(current: JobPass) -> datetime | None:
    """Return when the trainer counts as hung, or None while that cannot be judged.

    It is not judged while the buffer does not answer, because silence is no hang, nor while a queue
    holds what the trainer waits for.
    """
    gang = Gang("trainer", 0, current.spec.trainer.nodes)
    stored = current.status.gang(gang.role, gang.replica)
    if (
        stored is None
        or current.observed.progress is None
        or current.status.queued_time is not None
    ):
        return None
    facts = present_facts(gang, stored, current.pods, current.now)
    return deadlines.progress_due(current.spec, current.status, facts, gang.size)


def _advance_gangs(
    current: JobPass, gangs: Sequence[Gang], hang_time: datetime | None
) -> list[GangPlan]:
    members = by_gang(current.pods)
    plans = [_advance(current, gang, members[gang.role, gang.replica], hang_time) for gang in gangs]
    return job_group_first(current.status.pod_group, plans, current.pods)


def _advance(
    current: JobPass, gang: Gang, pods: Sequence[KubeObject], hang_time: datetime | None
) -> GangPlan:
    stored = current.status.gang(gang.role, gang.replica)
    hung = None
    if gang.role == "trainer" and stored is not None:
        pod = pod_name(current.job, "trainer", 0, stored.attempt, 0)
        hung = deadlines.hang(hang_time, current.status, current.spec, pod, current.now)
    return advance(gang, stored, pods, current.spec.failure_policy, current.now, hung)


def _with_clocks(current: JobPass, plans: Sequence[GangPlan]) -> JobPass:
    """Set the start or the queueing time, one of which is always empty, and the newest failure."""
    status, now = current.status, clock.text(current.now)
    queued = admission.is_queued(current, plans)
    return current.updated(
        start_time=None if queued else status.start_time or now,
        queued_time=status.queued_time or now if queued else None,
        last_failure=_newest_failure(current, plans),
    )


def _newest_failure(current: JobPass, plans: Sequence[GangPlan]) -> LastFailure | None:
    """Return the newest failure, which may be a container that its kubelet refuses to start."""
    before = current.status.last_failure
    newest = last_failure(current.status, plans)
    refused = failed_to_start(current.pods, current.observed.warned)
    # A refusal counts once, because a kubelet may report it under changing names.
    is_reported = (
        before is not None
        and refused is not None
        and (before.pod, before.container) == (refused.pod, refused.container)
    )
    if refused is None or is_reported or newest != before:
        return newest
    return refused.failure(current.now)


def _ending(current: JobPass, plans: Sequence[GangPlan]) -> ConditionUpdate | None:
    """Return the condition with which the job ends in this pass, or None if it goes on."""
    if any(has_succeeded(plan.gang, plan.facts) for plan in plans):
        return ConditionUpdate("Succeeded", "True", SUCCEEDED.name, SUCCEEDED.message)
    for plan in plans:
        if isinstance(plan.decision, GiveUp):
            return ConditionUpdate("Failed", "True", plan.decision.reason, plan.decision.message)
    spec, status, now = current.spec, current.status, current.now
    failed = deadlines.queue_timeout(spec, status, now, admission.cause(current))
    if failed is None:
        waiting = conditions.running(current, plans)
        failed = deadlines.job_deadline(spec, status, now, waiting.message)
    return ConditionUpdate("Failed", "True", *failed) if failed else None


def _status(
    current: JobPass, plans: Sequence[GangPlan], retired: Sequence[GangPlan]
) -> RLJobStatus:
    status = current.status
    queued = admission.cause(current) if status.queued_time else None
    updates = [
        admission.admitted(current),
        *model_fetched(current),
        conditions.running(current, plans, queued),
        conditions.weights_in_sync(current.observed.progress),
    ]
    if status.condition("Suspended"):
        updates.append(events.resumed_condition())
    return assembled(
        current,
        roles(status, plans, retired),
        updates,
        last_failure=last_failure(status, plans),
        rollout_replicas=current.spec.replicas,
        checkpoint_claim=checkpoint_name(current.job) if current.spec.checkpoint.claim else None,
    )


def _changes(
    current: JobPass,
    plans: Sequence[GangPlan],
    retired: Sequence[GangPlan],
    all_pods: Sequence[KubeObject],
) -> tuple[tuple[KubeObject, ...], tuple[Deletion, ...]]:
    """Return the objects to create and the deletions.

    all_pods: the job's pods, including those that only a finalizer of Kueue keeps.
    """
    job, observed = current.job, current.observed
    groups = groups_of(current, plans)
    create = missing_objects(job, observed) + missing_extras(job, observed)
    create += missing_pods(current, plans, groups)
    present = {group.name for group in groups.values() if group is not None}
    delete = tuple(deletion for plan in [*plans, *retired] for deletion in plan.delete)
    delete += unwanted_extras(job, observed, present) + finished_groups(all_pods, present)
    return create, delete


def _events(
    reported: JobPass, plans: Sequence[GangPlan], delete: Sequence[Deletion]
) -> tuple[Event, ...]:
    """Return the events of the pass. reported: the pass with its final status."""
    return (
        events.of_gangs(plans, reported.status)
        + events.of_change(reported.observed.status, reported.status)
        + events.of_deletions(delete)
        + events.of_defaults(reported.job, reported.observed)
    )


def _next_moments(
    reported: JobPass, plans: Sequence[GangPlan], hang_time: datetime | None
) -> list[datetime]:
    """Return the times at which the plan may change without another event."""
    status, queue_look = reported.status, reported.now + timedelta(seconds=QUEUE_LOOK_SECONDS)
    moments = deadlines.upcoming(reported.spec, status, hang_time)
    moments += [clock.parse(plan.status.retry_time) for plan in plans if plan.status.retry_time]
    moments += exit_times(reported.pods)
    moments += [plan.due for plan in plans if plan.due]
    if any(map(podstate.is_gated, reported.observed.episodes)):
        moments.append(queue_look)
    if give_back := give_back_time(status):
        moments += [queue_look, give_back]
    return moments
