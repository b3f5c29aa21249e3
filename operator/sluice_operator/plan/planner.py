"""plan(): the decision of one pass over one job, from its spec, the observed cluster and the time.

Pure: no clock, no I/O, no randomness. Every branch returns a complete status, which the caller
writes before it deletes or creates anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from sluice.api import MANAGER, RLJob, RLJobStatus
from sluice_operator.plan.decide.episodes import (
    episode_slots,
    missing_episode_pods,
    split_episodes,
    surplus_episode_pods,
)
from sluice_operator.plan.facts.constants import NO_SANDBOXES, SANDBOX_LOOK_SECONDS
from sluice_operator.plan.facts.job_defaults import with_job_defaults
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import Event, Images, Observed, Plan
from sluice_operator.plan.facts.names import SANDBOX
from sluice_operator.plan.manifests import sandbox
from sluice_operator.plan.manifests.episodes import episode_pod
from sluice_operator.plan.report.blocked import blocked_episodes
from sluice_operator.plan.report.goodput import with_goodput
from sluice_operator.plan.report.status import with_note, with_progress
from sluice_operator.plan.running import running
from sluice_operator.plan.stopping import finished, suspended

DEFAULT_IMAGES = Images()


def plan(job: RLJob, observed: Observed, now: datetime, images: Images = DEFAULT_IMAGES) -> Plan:
    """Decide what to do for a job now.

    Parameters
    ----------
    job
        The job as it is reconciled.
    observed
        The cluster's objects and the stored status.
    now
        The time of this pass.
    images
        Container images of the roles.

    """
    pods, episodes = split_episodes(observed.pods)
    episodes += sandbox.without_pod(observed)
    observed = replace(observed, pods=pods, episodes=episodes)
    current = JobPass(job, observed.status or RLJobStatus(), observed, now, images)

    decided = _with_episode_pods(current, _plan_of_gangs(current))
    if sandbox.is_missing(job, observed) and not _is_at_rest(job, decided.status):
        return _start_nothing(decided, observed)
    blocked = blocked_episodes(episodes, observed.warned, now)
    note = observed.note or (blocked.text() if blocked else "")
    return replace(decided, status=with_note(decided.status, note))


def _plan_of_gangs(current: JobPass) -> Plan:
    """Decide about everything but the pods of episodes."""
    # Another controller owns the job.
    if not _is_managed_here(current.job):
        return Plan(current.status)
    if is_finished(current.status):
        return finished(current)
    status = with_goodput(current.job, current.status, current.observed.progress)
    status = with_progress(status, current.observed.progress, current.now)
    current = current.with_status(status)
    if current.spec.suspend:
        return suspended(current)
    return running(current)


def _with_episode_pods(current: JobPass, decided: Plan) -> Plan:
    """Add the creation and deletion of episode pods to the plan.

    A job at rest has no such pods. On a laptop the workers run the episodes' programs themselves.
    """
    job, observed, episodes = current.job, current.observed, current.observed.episodes
    has_none = _is_at_rest(job, decided.status) or observed.operator_namespace is None
    slots = [] if has_none else episode_slots(job, observed.pods)
    missing = missing_episode_pods(slots, episodes)
    full_job = with_job_defaults(job, observed.defaults) if missing else job
    pods = [episode_pod(full_job, pod, current.images) for pod in missing]
    waits = any(pod["kind"] == SANDBOX for pod in episodes)
    return replace(
        decided,
        create=decided.create + sandbox.with_sandboxes(job, pods, observed),
        delete=decided.delete
        + surplus_episode_pods(slots, episodes, current.now, observed.sandboxes),
        requeue_after=_sooner(decided.requeue_after, SANDBOX_LOOK_SECONDS)
        if waits
        else decided.requeue_after,
    )


def _start_nothing(decided: Plan, observed: Observed) -> Plan:
    """Hold a job back that needs Sandboxes in a cluster without them.

    Its GPUs would only wait for episodes that cannot be played.
    """
    before = observed.status.condition("Running") if observed.status else None
    is_reported = before is not None and NO_SANDBOXES.message in before.message
    news: Sequence[Event] = (
        () if is_reported else (Event("Warning", NO_SANDBOXES.name, NO_SANDBOXES.message),)
    )
    return replace(
        decided,
        status=with_note(decided.status, NO_SANDBOXES.message),
        create=(),
        events=(*decided.events, *news),
        requeue_after=_sooner(decided.requeue_after, SANDBOX_LOOK_SECONDS),
    )


def _is_at_rest(job: RLJob, status: RLJobStatus) -> bool:
    """Return True if no pod of the job should run, or if another controller owns the job."""
    return is_finished(status) or job.spec.suspend or not _is_managed_here(job)


def _is_managed_here(job: RLJob) -> bool:
    return job.spec.managed_by in (None, MANAGER)


def is_finished(status: RLJobStatus) -> bool:
    return status.is_true("Succeeded") or status.is_true("Failed")


def _sooner(seconds: float | None, limit: float) -> float:
    return limit if seconds is None else min(seconds, limit)
