"""plan(): the whole decision of one pass, from (spec, observed, now).

Pure: no clock, no I/O, no randomness.

It reads in the order in which things matter: not ours, finished, suspended, and else a running job,
whose gangs are advanced one by one. Every branch answers with a complete status; the caller writes
it before it destroys anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from sluice.api import MANAGER, RLJob, RLJobStatus
from sluice_operator.plan.decide.episodes import over, places, split, turns
from sluice_operator.plan.defaults import with_defaults
from sluice_operator.plan.facts.constants import NO_SANDBOXES, SANDBOX_LOOK_SECONDS
from sluice_operator.plan.facts.model import Event, Images, KubeObject, Observed, Plan
from sluice_operator.plan.facts.names import SANDBOX
from sluice_operator.plan.manifests import sandbox
from sluice_operator.plan.manifests.episodes import episode_pod
from sluice_operator.plan.report.blocked import blocked_episodes
from sluice_operator.plan.report.goodput import with_goodput
from sluice_operator.plan.report.status import (
    with_note,
    with_progress,
)
from sluice_operator.plan.running import running
from sluice_operator.plan.stopping import finished, suspended

DEFAULT_IMAGES = Images()


def plan(job: RLJob, observed: Observed, now: datetime, images: Images = DEFAULT_IMAGES) -> Plan:
    """Decide what to do for one job now."""
    pods, episodes = split(observed.pods)
    episodes += sandbox.without_pod(observed)
    decided = _decided(job, replace(observed, pods=pods, episodes=episodes), now, images)
    decided = _with_episodes(job, decided, observed, episodes, now, images)
    if sandbox.is_missing(job, observed) and not _rests(job, decided.status):
        return _held_back(decided, observed)
    stuck = blocked_episodes(episodes, observed.warned, now)
    note = observed.note or (stuck.text() if stuck else "")
    return replace(decided, status=with_note(decided.status, note))


def _held_back(decided: Plan, observed: Observed) -> Plan:
    """The plan for a cluster without the Sandboxes that the job asks for. Nothing is started: its
    GPUs would wait for episodes that nobody can play.
    """
    before = observed.status.condition("Running") if observed.status else None
    told = before is not None and NO_SANDBOXES.message in before.message
    news = () if told else (Event("Warning", NO_SANDBOXES.name, NO_SANDBOXES.message),)
    return replace(
        decided,
        status=with_note(decided.status, NO_SANDBOXES.message),
        create=(),
        events=decided.events + news,
        requeue_after=_sooner(decided.requeue_after, SANDBOX_LOOK_SECONDS),
    )


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
    rests = _rests(job, decided.status) or observed.operator_namespace is None
    wanted = [] if rests else places(job, observed.pods)
    missing = turns(wanted, episodes)
    full = with_defaults(job, observed.defaults) if missing else job
    pods = [episode_pod(full, turn, images) for turn in missing]
    waits = any(each["kind"] == SANDBOX for each in episodes)
    return replace(
        decided,
        create=decided.create + sandbox.with_sandboxes(job, pods, observed),
        delete=decided.delete + over(wanted, episodes, now, observed.sandboxes),
        requeue_after=_sooner(decided.requeue_after, SANDBOX_LOOK_SECONDS)
        if waits
        else decided.requeue_after,
    )


def _rests(job: RLJob, status: RLJobStatus) -> bool:
    """Nothing of the job is to run, or it is no matter of ours."""
    ours = job.spec.managed_by in (None, MANAGER)
    return is_finished(status) or job.spec.suspend or not ours


def _decided(job: RLJob, observed: Observed, now: datetime, images: Images) -> Plan:
    status = observed.status or RLJobStatus()
    if job.spec.managed_by not in (None, MANAGER):
        return Plan(status)
    if is_finished(status):
        return finished(job, status, observed, now)
    status = with_goodput(job, status, observed.progress)
    status = with_progress(status, observed.progress, now)
    if job.spec.suspend:
        return suspended(job, status, observed, now)
    return running(job, status, observed, now, images)


def is_finished(status: RLJobStatus) -> bool:
    return status.is_true("Succeeded") or status.is_true("Failed")


def _sooner(seconds: float | None, limit: float) -> float:
    return limit if seconds is None else min(seconds, limit)
