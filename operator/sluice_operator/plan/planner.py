"""plan(): the decision of one pass over one job, from its spec, the observed cluster and the time.

Pure: no clock, no I/O, no randomness. Every branch returns a complete status, which the caller
writes before it deletes or creates anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sluice.api import MANAGER, RLJob, RLJobStatus
from sluice_operator.plan.decide.episodes import (
    episode_slots,
    missing_episode_pods,
    split_episodes,
    surplus_episode_pods,
)
from sluice_operator.plan.decide.pools import with_workers
from sluice_operator.plan.facts.constants import (
    NO_SANDBOXES,
    POOL_LOOK_SECONDS,
    POOL_UNUSABLE,
    SANDBOX_LOOK_SECONDS,
)
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
    job = with_workers(job, observed.pool, observed.status)
    pods, episodes = split_episodes(observed.pods)
    episodes += sandbox.without_pod(observed)
    observed = replace(observed, pods=pods, episodes=episodes)
    current = JobPass(job, observed.status or RLJobStatus(), observed, now, images)

    decided = _with_episode_pods(current, _plan_of_gangs(current))
    if (obstacle := _obstacle(job, observed)) and not _is_at_rest(job, decided.status):
        return _start_nothing(decided, observed, obstacle)
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
    missing = missing_episode_pods(job, slots, episodes, observed.demands)
    full_job = with_job_defaults(job, observed.defaults) if missing else job
    pods = [episode_pod(full_job, pod, current.images) for pod in missing]
    waits = any(pod["kind"] == SANDBOX for pod in episodes)
    return replace(
        decided,
        create=decided.create + sandbox.with_sandboxes(job, pods, observed),
        delete=decided.delete
        + surplus_episode_pods(slots, episodes, current.now, observed.sandboxes, observed.demands),
        requeue_after=_sooner(decided.requeue_after, SANDBOX_LOOK_SECONDS)
        if waits
        else decided.requeue_after,
    )


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """Something that the cluster lacks and the job needs. look_seconds: when to look again."""

    reason: str
    message: str
    look_seconds: float


def _obstacle(job: RLJob, observed: Observed) -> _Obstacle | None:
    """Return what the job cannot start without: Sandboxes, or the pool of its engines.

    Its GPUs would only wait.
    """
    if sandbox.is_missing(job, observed):
        return _Obstacle(NO_SANDBOXES.name, NO_SANDBOXES.message, SANDBOX_LOOK_SECONDS)
    pool = observed.pool
    if pool is not None and pool.problem:
        text = POOL_UNUSABLE.text(problem=pool.problem)
        return _Obstacle(POOL_UNUSABLE.name, text, POOL_LOOK_SECONDS)
    return None


def _start_nothing(decided: Plan, observed: Observed, obstacle: _Obstacle) -> Plan:
    """Return the plan without creations, with the reason in status and events.

    What runs goes on.
    """
    before = observed.status.condition("Running") if observed.status else None
    is_reported = before is not None and obstacle.message in before.message
    news: Sequence[Event] = (
        () if is_reported else (Event("Warning", obstacle.reason, obstacle.message),)
    )
    return replace(
        decided,
        status=with_note(decided.status, obstacle.message),
        create=(),
        events=(*decided.events, *news),
        requeue_after=_sooner(decided.requeue_after, obstacle.look_seconds),
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
