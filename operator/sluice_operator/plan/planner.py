"""plan(): the whole decision of one pass, from (spec, observed, now).

Pure: no clock, no I/O, no randomness.

It reads in the order in which things matter: not ours, finished, suspended, and else a running job,
whose gangs are advanced one by one. Every branch answers with a complete status; the caller writes
it before it destroys anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast

from sluice.api import MANAGER, GangStatus, LastFailure, RLJob, RLJobStatus, RoleName
from sluice_operator.plan import clock, podstate
from sluice_operator.plan.constants import (
    NOT_ADMITTED,
    QUEUE_LOOK_SECONDS,
    STARTUP_DEADLINE,
    STOPPED,
    SUCCEEDED,
    SUSPENDED,
)
from sluice_operator.plan.decide import deadlines
from sluice_operator.plan.decide.drain import drain, to_drain
from sluice_operator.plan.decide.episodes import over, places, split, turns
from sluice_operator.plan.decide.gang_facts import gang_facts
from sluice_operator.plan.decide.gangs import (
    Step,
    advance,
    by_gang,
    deletions,
    force_times,
    of_gang,
    retire,
    rollout_replicas,
)
from sluice_operator.plan.decide.restart import GiveUp
from sluice_operator.plan.decide.success import has_succeeded
from sluice_operator.plan.decide.ttl import expiry
from sluice_operator.plan.defaults import with_defaults
from sluice_operator.plan.manifests import podgroup
from sluice_operator.plan.manifests.creation import groups_of, missing_pods
from sluice_operator.plan.manifests.episodes import episode_pod
from sluice_operator.plan.manifests.extras import missing_extras, unwanted_extras
from sluice_operator.plan.manifests.objects import missing_objects
from sluice_operator.plan.model import Deletion, Gang, GangFacts, Images, KubeObject, Observed, Plan
from sluice_operator.plan.names import checkpoint_name, pod_name
from sluice_operator.plan.report import admission, conditions, events
from sluice_operator.plan.report.blocked import blocked, blocked_episodes, failed_to_start
from sluice_operator.plan.report.conditions import Finding
from sluice_operator.plan.report.goodput import with_goodput
from sluice_operator.plan.report.status import (
    assembled,
    last_failure,
    roles,
    with_note,
    with_progress,
)

DEFAULT_IMAGES = Images()


def plan(job: RLJob, observed: Observed, now: datetime, images: Images = DEFAULT_IMAGES) -> Plan:
    """Decide what to do for one job now."""
    pods, episodes = split(observed.pods)
    decided = _decided(job, replace(observed, pods=pods), now, images)
    decided = _with_episodes(job, decided, observed, episodes, now, images)
    stuck = blocked_episodes(episodes, observed.warned)
    note = observed.note or (stuck.text() if stuck else "")
    return replace(decided, status=with_note(decided.status, note))


def _with_episodes(
    job: RLJob,
    decided: Plan,
    observed: Observed,
    episodes: Sequence[KubeObject],
    now: datetime,
    images: Images,
) -> Plan:
    """The plan with the pods of episodes, of which a job that does not run has none. On a laptop
    the workers run their programs.
    """
    status = decided.status
    rests = is_finished(status) or job.spec.suspend or observed.operator_namespace is None
    wanted = [] if rests else places(job, observed.pods)
    missing = turns(wanted, episodes)
    full = with_defaults(job, observed.defaults) if missing else job
    create = tuple(episode_pod(full, turn, images) for turn in missing)
    delete = over(wanted, episodes, now)
    return replace(decided, create=decided.create + create, delete=decided.delete + delete)


def _decided(job: RLJob, observed: Observed, now: datetime, images: Images) -> Plan:
    status = observed.status or RLJobStatus()
    if job.spec.managed_by not in (None, MANAGER):
        return Plan(status)
    if is_finished(status):
        return _finished(job, status, observed, now)
    status = with_goodput(job, status, observed.progress)
    status = with_progress(status, observed.progress, now)
    if job.spec.suspend:
        return _suspended(job, status, observed, now)
    return _running(job, status, observed, now, images)


def _living(observed: Observed) -> Observed:
    """Without pods that only a finalizer keeps: for all but Kueue they are gone."""
    return replace(observed, pods=tuple(pod for pod in observed.pods if not podstate.has_left(pod)))


def is_finished(status: RLJobStatus) -> bool:
    return status.is_true("Succeeded") or status.is_true("Failed")


def _running(
    job: RLJob, status: RLJobStatus, observed: Observed, now: datetime, images: Images
) -> Plan:
    status = podgroup.renewed(job, status, observed, now)
    status = status.model_copy(update={"pod_group": podgroup.shared_group(job, status, observed)})
    known, observed = observed.pods, _living(observed)
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
        return _finish(job, status, observed, now, ending, steps)
    retired = _retired(status, gangs, observed.pods, now)
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
    moments = deadlines.upcoming(job.spec, new, due) + _retries(steps) + force_times(observed.pods)
    moments += [step.due for step in steps if step.due]
    if give_back := podgroup.give_back_time(new):
        moments += [now + timedelta(seconds=QUEUE_LOOK_SECONDS), give_back]
    return Plan(new, create, delete, emitted, _requeue(moments, now))


def _clocked(
    job: RLJob, status: RLJobStatus, steps: Sequence[Step], observed: Observed, now: datetime
) -> RLJobStatus:
    """The status with its clocks, which stand still while a queue holds the job, and with the
    newest failure.
    """
    queued = admission.is_queued(job, steps, observed.pods)
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
    """When the trainer counts as hung. Not judged while the buffer cannot be asked: silence is not
    a hang.
    """
    gang = Gang("trainer", 0, job.spec.trainer.nodes)
    known = status.gang(gang.role, gang.replica)
    if known is None or observed.progress is None:
        return None
    return deadlines.progress_due(
        job.spec, status, known, _present_facts(gang, known, observed.pods, now), gang.size
    )


def _present_facts(
    gang: Gang, known: GangStatus | None, pods: Sequence[KubeObject], now: datetime
) -> GangFacts:
    attempt = known.attempt if known else 1
    return gang_facts(
        gang, [pod for pod in of_gang(gang, pods) if podstate.attempt(pod) == attempt], now
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
    tired = deadlines.queue_timeout(job.spec, status, now, admission.cause(job, observed))
    if tired is not None:
        return Finding("Failed", "True", *tired)
    waiting = conditions.running(
        status, steps, observed.pods, observed.progress, warned=observed.warned
    )
    late = deadlines.job_deadline(job.spec, status, now, waiting.message)
    return Finding("Failed", "True", *late) if late else None


def _finish(
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


def _finished(job: RLJob, status: RLJobStatus, observed: Observed, now: datetime) -> Plan:
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
            new, (), delete, events.of_deletions(delete), _requeue(force_times(observed.pods), now)
        )
    if now < moment:
        return Plan(new, requeue_after=_requeue([moment], now))
    return Plan(new, (), (Deletion("RLJob", job.metadata.name),), (events.expired(job),))


def _suspended(job: RLJob, status: RLJobStatus, observed: Observed, now: datetime) -> Plan:
    """All pods go; storage, attempts and counts stay.

    The clocks of the deadlines start again on resume.
    """
    status = status.model_copy(
        update={"pod_group": podgroup.following(job, status, observed), "queued_time": None}
    )
    known, observed = observed.pods, _living(observed)
    trainer = Gang("trainer", 0, job.spec.trainer.nodes)
    facts = _present_facts(trainer, status.gang("trainer", 0), observed.pods, now)
    if has_succeeded(trainer, facts):
        done = Finding("Succeeded", "True", SUCCEEDED.name, SUCCEEDED.message)
        return _finish(job, status, observed, now, done, [])
    findings = [
        Finding("Suspended", "True", SUSPENDED.name, SUSPENDED.message),
        Finding("Running", "False", STOPPED.name, STOPPED.text(state="is suspended")),
        Finding("Admitted", "False", NOT_ADMITTED.name, NOT_ADMITTED.text(state="is suspended")),
    ]
    retired = _retired(status, [], observed.pods, now)
    replicas = rollout_replicas(job, status)
    new = assembled(
        job,
        status,
        roles(status, [], retired),
        findings,
        now,
        start_time=None,
        rollout_replicas=replicas,
    )
    delete = drain(observed.pods, now) + unwanted_extras(job, observed) + podgroup.ends(known)
    emitted = events.of_change(observed.status, new) + events.of_deletions(delete)
    return Plan(new, (), delete, emitted, _requeue(force_times(observed.pods), now))


def _retired(
    status: RLJobStatus, wanted: Sequence[Gang], pods: Sequence[KubeObject], now: datetime
) -> list[Step]:
    """Gangs that have a status, or pods, and are not wanted: they get their next attempt number and
    lose their pods.
    """
    keep = {(gang.role, gang.replica) for gang in wanted}
    members = by_gang(pods)
    unknown = {
        (cast(RoleName, role), replica): GangStatus(replica=replica, attempt=1)
        for role, replica in members
    }
    known = {(role.name, gang.replica): gang for role in status.roles for gang in role.gangs}
    steps = []
    for (role, replica), gang_status in (unknown | known).items():
        if (role, replica) not in keep:
            gang = Gang(role, replica, 1)
            left = members[role, replica]
            steps.append(Step(gang, retire(gang_status, left, now), delete=deletions(left, now)))
    return steps


def _running_status(
    job: RLJob,
    status: RLJobStatus,
    steps: list[Step],
    retired: list[Step],
    observed: Observed,
    now: datetime,
) -> RLJobStatus:
    queued = admission.cause(job, observed) if status.queued_time else None
    findings = [
        admission.admitted(job, observed),
        conditions.running(
            status, steps, observed.pods, observed.progress, queued=queued, warned=observed.warned
        ),
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
        rollout_replicas=rollout_replicas(job, status),
        checkpoint_claim=checkpoint_name(job) if job.spec.checkpoint.claim else None,
    )


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


def _retries(steps: Sequence[Step]) -> list[datetime]:
    return [clock.parse(step.status.retry_time) for step in steps if step.status.retry_time]


def _requeue(moments: Sequence[datetime], now: datetime) -> float | None:
    """Seconds to the next moment that may change the plan.

    What is past has been acted on in this pass.
    """
    return min(((moment - now).total_seconds() for moment in moments if moment > now), default=None)
