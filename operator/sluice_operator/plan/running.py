"""A pass over a job that runs: its gangs are advanced one by one, until one of them, or a clock,
ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sluice.api import LastFailure, RLJob, RLJobStatus
from sluice_operator.plan.decide import deadlines
from sluice_operator.plan.decide.gangs import (
    Step,
    advance,
    by_gang,
    exit_times,
    living,
    present_facts,
)
from sluice_operator.plan.decide.restart import GiveUp
from sluice_operator.plan.decide.scale_down import retired_gangs
from sluice_operator.plan.decide.success import has_succeeded
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.constants import QUEUE_LOOK_SECONDS, SUCCEEDED
from sluice_operator.plan.facts.model import Gang, Images, KubeObject, Observed, Plan
from sluice_operator.plan.facts.names import checkpoint_name, pod_name
from sluice_operator.plan.manifests import podgroup
from sluice_operator.plan.manifests.creation import groups_of, missing_pods
from sluice_operator.plan.manifests.objects import missing_objects
from sluice_operator.plan.manifests.optional_objects import missing_extras, unwanted_extras
from sluice_operator.plan.report import admission, conditions, events
from sluice_operator.plan.report.blocked import failed_to_start
from sluice_operator.plan.report.conditions import Finding
from sluice_operator.plan.report.status import (
    assembled,
    last_failure,
    roles,
)
from sluice_operator.plan.stopping import finish


def running(
    job: RLJob, status: RLJobStatus, observed: Observed, now: datetime, images: Images
) -> Plan:
    status = podgroup.renewed(job, status, observed, now)
    status = status.model_copy(update={"pod_group": podgroup.shared_group(job, status, observed)})
    known, observed = observed.pods, living(observed)
    gangs = podgroup.wanted_gangs(job, status, now)
    due = _progress_due(job, status, observed, now)
    members = by_gang(observed.pods)
    steps = [
        _advance(job, gang, status, members[gang.role, gang.replica], due, now) for gang in gangs
    ]
    steps = podgroup.in_order(status.pod_group, steps, observed.pods)
    status = _clocked(job, status, steps, observed, now)
    ending = _ending(job, status, steps, observed, now)
    if ending is not None:
        return finish(job, status, observed, now, ending, steps)
    retired = retired_gangs(status, gangs, observed.pods, now)
    new = _running_status(job, status, steps, retired, observed, now)
    groups = groups_of(job, status, steps)
    create = missing_objects(job, observed) + missing_extras(job, observed)
    create += missing_pods(job, steps, groups, observed, images)
    present = {group.name for group in groups.values() if group is not None}
    delete = tuple(deletion for step in [*steps, *retired] for deletion in step.delete)
    delete += unwanted_extras(job, observed, present) + podgroup.ends(known, present)
    emitted = (
        events.of_steps(steps, new)
        + events.of_change(observed.status, new)
        + events.of_deletions(delete)
    )
    emitted += events.of_defaults(job, observed)
    moments = deadlines.upcoming(job.spec, new, due) + _retries(steps) + exit_times(observed.pods)
    moments += [step.due for step in steps if step.due]
    if any(map(podstate.is_gated, observed.episodes)):
        moments.append(now + timedelta(seconds=QUEUE_LOOK_SECONDS))
    if give_back := podgroup.give_back_time(new):
        moments += [now + timedelta(seconds=QUEUE_LOOK_SECONDS), give_back]
    return Plan(new, create, delete, emitted, clock.until_next(moments, now))


def _clocked(
    job: RLJob, status: RLJobStatus, steps: Sequence[Step], observed: Observed, now: datetime
) -> RLJobStatus:
    """The status with its clocks, which stand still while a queue holds the job, and with the
    newest failure.
    """
    queued = admission.is_queued(job, steps, observed, now)
    clocks = {
        "start_time": None if queued else status.start_time or clock.text(now),
        "queued_time": status.queued_time or clock.text(now) if queued else None,
    }
    return status.model_copy(
        update=clocks | {"last_failure": _newest_failure(status, steps, observed, now)}
    )


def _newest_failure(
    status: RLJobStatus, steps: Sequence[Step], observed: Observed, now: datetime
) -> LastFailure | None:
    """The newest failure; what a kubelet refuses to start is one, once: it may be refused under
    changing names.
    """
    newest, before = last_failure(status, steps), status.last_failure
    refused = failed_to_start(observed.pods, observed.warned)
    known = (
        before is not None
        and refused is not None
        and (before.pod, before.container) == refused.place
    )
    return newest if refused is None or known or newest != before else refused.failure(now)


def _advance(
    job: RLJob,
    gang: Gang,
    status: RLJobStatus,
    pods: Sequence[KubeObject],
    due: datetime | None,
    now: datetime,
) -> Step:
    known = status.gang(gang.role, gang.replica)
    hung = None
    if gang.role == "trainer" and known is not None:
        pod = pod_name(job, "trainer", 0, known.attempt, 0)
        hung = deadlines.hang(due, status, job.spec, pod, now)
    return advance(gang, known, pods, job.spec.failure_policy, now, hung)


def _progress_due(
    job: RLJob, status: RLJobStatus, observed: Observed, now: datetime
) -> datetime | None:
    """When the trainer counts as hung. Not judged while the buffer cannot be asked, for silence is
    not a hang, nor while a queue holds what the trainer waits for.
    """
    gang = Gang("trainer", 0, job.spec.trainer.nodes)
    known = status.gang(gang.role, gang.replica)
    if known is None or observed.progress is None or status.queued_time is not None:
        return None
    return deadlines.progress_due(
        job.spec, status, known, present_facts(gang, known, observed.pods, now), gang.size
    )


def _ending(
    job: RLJob, status: RLJobStatus, steps: Sequence[Step], observed: Observed, now: datetime
) -> Finding | None:
    """How the job ends in this pass; None: it goes on."""
    if any(has_succeeded(step.gang, step.facts) for step in steps):
        return Finding("Succeeded", "True", SUCCEEDED.name, SUCCEEDED.message)
    for step in steps:
        if isinstance(step.decision, GiveUp):
            return Finding("Failed", "True", step.decision.reason, step.decision.message)
    tired = deadlines.queue_timeout(job.spec, status, now, admission.cause(job, observed, now))
    if tired is not None:
        return Finding("Failed", "True", *tired)
    waiting = _running(job, status, steps, observed, now)
    late = deadlines.job_deadline(job.spec, status, now, waiting.message)
    return Finding("Failed", "True", *late) if late else None


def _running(
    job: RLJob,
    status: RLJobStatus,
    steps: Sequence[Step],
    observed: Observed,
    now: datetime,
    queued: str | None = None,
) -> Finding:
    """Can the job train? queued: as `conditions.running` has it."""
    return conditions.running(
        status,
        steps,
        observed.pods,
        observed.progress,
        now,
        queued=queued,
        warned=observed.warned,
        may_compile=job.spec.on_gpu and job.spec.kernel_cache is None,
    )


def _running_status(
    job: RLJob,
    status: RLJobStatus,
    steps: list[Step],
    retired: list[Step],
    observed: Observed,
    now: datetime,
) -> RLJobStatus:
    queued = admission.cause(job, observed, now) if status.queued_time else None
    findings = [
        admission.admitted(job, observed, now),
        _running(job, status, steps, observed, now, queued),
        conditions.weights_in_sync(observed.progress),
    ]
    if status.condition("Suspended"):
        findings.append(events.resumed_finding())
    return assembled(
        job,
        status,
        roles(status, steps, retired),
        findings,
        now,
        last_failure=last_failure(status, steps),
        rollout_replicas=job.spec.replicas,
        checkpoint_claim=checkpoint_name(job) if job.spec.checkpoint.claim else None,
    )


def _retries(steps: Sequence[Step]) -> list[datetime]:
    return [clock.parse(step.status.retry_time) for step in steps if step.status.retry_time]
