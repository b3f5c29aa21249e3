"""Conditions in Kubernetes' sense, and the one-word state that is derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Literal

from sluice.api import Condition, ConditionType, RLJobStatus
from sluice_operator.plan.decide.deletion import force_time, grace_end
from sluice_operator.plan.decide.gangs import GangPlan, by_gang
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.constants import (
    HOPELESS,
    HOPELESS_AFTER,
    IN_SYNC,
    NO_ENGINES,
    OUT_OF_SYNC,
    PENDING,
    QUEUED,
    RESTARTING,
    RUNNING,
    STARTING,
    SYNC_UNKNOWN,
    UNREACHABLE,
)
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import KubeObject, Progress
from sluice_operator.plan.facts.podstate import headline
from sluice_operator.plan.report.blocked import blocked

ConditionStatus = Literal["True", "False", "Unknown"]
_ORDER: tuple[ConditionType, ...] = (
    "Admitted",
    "ModelFetched",
    "Running",
    "WeightsInSync",
    "Suspended",
    "Succeeded",
    "Failed",
)
_AT_REST: tuple[ConditionType, ...] = ("Succeeded", "Failed", "Suspended")
_MESSAGE_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """The content that a condition should have now."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str


def updated(
    status: RLJobStatus, updates: Sequence[ConditionUpdate], generation: int, now: datetime
) -> list[Condition]:
    """Return the status's conditions after these updates.

    lastTransitionTime changes only if the condition's `status` does.
    """
    by_type = {condition.type: condition for condition in status.conditions}
    for update in updates:
        before = by_type.get(update.type)
        same = before is not None and before.status == update.status
        by_type[update.type] = Condition(
            type=update.type,
            status=update.status,
            reason=update.reason,
            message=update.message[:_MESSAGE_LIMIT],
            last_transition_time=before.last_transition_time
            if same and before
            else clock.text(now),
            observed_generation=generation,
        )
    return [by_type[kind] for kind in _ORDER if kind in by_type]


def state_word(conditions: Sequence[Condition]) -> str:
    """Return the job's state in one word.

    Pending, Queued, Starting, Running, Restarting, Suspended, Succeeded or Failed.
    """
    running = _decisive(conditions)
    if running is None:
        return "Pending"
    if running.type != "Running":
        return running.type
    if running.reason == PENDING.name or running.status == "Unknown":
        return "Pending"
    if running.reason == QUEUED.name:
        return "Queued"
    if running.status == "True":
        return "Running"
    return "Restarting" if running.reason == RESTARTING.name else "Starting"


def summary(conditions: Sequence[Condition]) -> dict[str, str]:
    """Return the status fields that summarize the job: `state`, and the `reason` for it."""
    decisive = _decisive(conditions)
    return {"state": state_word(conditions), "reason": decisive.reason if decisive else ""}


def _decisive(conditions: Sequence[Condition]) -> Condition | None:
    """Return the condition that matters most: how the job ended, Suspended, or else Running."""
    by_type = {condition.type: condition for condition in conditions}
    ends = (by_type.get(kind) for kind in _AT_REST)
    return next((end for end in ends if end and end.status == "True"), by_type.get("Running"))


def running(
    current: JobPass, plans: Sequence[GangPlan], queued: str | None = None
) -> ConditionUpdate:
    """Return the condition Running, which is True while the job can train.

    It can if trainer, buffer, rendezvous and at least one engine are ready and have begun to work.
    Training goes on while a rollout replica is down and another one serves, so that does not
    change the condition.

    Parameters
    ----------
    current
        The pass over the job.
    plans
        The plans of its gangs.
    queued
        Why a queue has not admitted the job, empty if the cause is not known; None if no queue
        holds it.

    """
    status, progress = current.status, current.observed.progress
    if queued is not None:
        return _not_running(QUEUED.name, QUEUED.text(detail=f": {queued}" if queued else ""))

    missing = [plan for plan in _required(plans) if not is_up(plan)]
    ready = sum(plan.facts.ready for plan in plans)
    desired = sum(plan.gang.size for plan in plans)
    obstacle = blocked(current.pods, current.observed.warned)

    recovering = [plan for plan in missing if _is_recovering(plan, status)]
    if recovering:
        gangs = ", ".join(
            f"{plan.gang.name} (attempt {plan.status.attempt})" for plan in recovering
        )
        causes = (
            _overdue_member(recovering, current.pods, current.now),
            obstacle.text() if obstacle else _last_failure(status),
        )
        detail = _detail("; ".join(filter(None, causes)))
        return _not_running(RESTARTING.name, RESTARTING.text(gangs=gangs, detail=detail))

    if any(plan.facts.running + plan.facts.succeeded < plan.gang.size for plan in missing):
        detail = _detail(obstacle.text() if obstacle else "")
        text = PENDING.text(ready=ready, desired=desired, detail=detail)
        return _not_running(PENDING.name, text)

    fresh = status.last_progress_time is None
    unready = [plan.gang.name for plan in missing if plan.gang.role != "rollout"]
    if unready:
        return _starting(f"waiting for {', '.join(unready)}")
    if fresh and not missing and progress is None:
        return _not_running(UNREACHABLE.name, UNREACHABLE.message)

    # A job that runs stays Running while its engines take their next weights. One that learns from
    # given answers has none.
    first = fresh and not status.is_true("Running") and not current.spec.algorithm.offline
    if missing or (first and progress is not None and progress.engines_in_sync == 0):
        return _starting(_engine_start(current))
    text = RUNNING.text(ready=ready, desired=desired)
    return ConditionUpdate("Running", "True", RUNNING.name, text)


def _not_running(reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate("Running", "False", reason, message)


def _starting(waiting: str) -> ConditionUpdate:
    return _not_running(STARTING.name, STARTING.text(waiting=waiting))


def _engine_start(current: JobPass) -> str:
    """Return what the engines wait for, if no engine can generate yet."""
    progress = current.observed.progress
    if progress is None:
        return "no engine is ready yet"
    if progress.engines:
        return f"no engine holds the weights yet{_detail(progress.dropped)}"
    if current.spec.uses_pool:
        return f"no engine of the pool {current.spec.rollout.pool} answers yet"
    text = "no engine has started yet"
    if current.spec.on_gpu and current.spec.kernel_cache is None:
        text += "; the first start compiles kernels, which takes minutes (kernelCache keeps them)"
    return text


def _overdue_member(plans: Sequence[GangPlan], pods: Sequence[KubeObject], now: datetime) -> str:
    """Return the pod of these gangs that takes too long to end; empty if there is none."""
    members = by_gang(pods)
    gangs = (members[plan.gang.role, plan.gang.replica] for plan in plans)
    return overdue(list(chain.from_iterable(gangs)), now)


def _detail(text: str) -> str:
    return f"; {text}" if text else ""


def _last_failure(status: RLJobStatus) -> str:
    """Return the last failure in words.

    A pod that fails again and again waits for its next attempt most of the time, so its status
    rarely shows the failure.
    """
    failure = status.last_failure
    if failure is None:
        return ""
    return "; ".join(filter(None, (f"{failure.pod}: {headline(failure)}", hopeless(status))))


def hopeless(status: RLJobStatus) -> str:
    """Return a note if the start has failed several times in the same way; empty otherwise."""
    failure = status.last_failure
    if failure is None or failure.times < HOPELESS_AFTER or status.last_progress_time is not None:
        return ""
    return HOPELESS.format(times=failure.times)


def weights_in_sync(progress: Progress | None) -> ConditionUpdate:
    if progress is None:
        return ConditionUpdate("WeightsInSync", "Unknown", SYNC_UNKNOWN.name, SYNC_UNKNOWN.message)
    if progress.engines == 0:
        return ConditionUpdate("WeightsInSync", "False", NO_ENGINES.name, NO_ENGINES.message)
    if progress.engines_in_sync < progress.engines:
        text = OUT_OF_SYNC.text(detail=_detail(progress.dropped))
        return ConditionUpdate("WeightsInSync", "False", OUT_OF_SYNC.name, text)
    return ConditionUpdate("WeightsInSync", "True", IN_SYNC.name, IN_SYNC.message)


def is_up(plan: GangPlan) -> bool:
    return plan.facts.ready + plan.facts.succeeded >= plan.gang.size


def _required(plans: Sequence[GangPlan]) -> list[GangPlan]:
    """Return the gangs that training needs; of the engines, any one is enough."""
    rollouts = [plan for plan in plans if plan.gang.role == "rollout"]
    others = [plan for plan in plans if plan.gang.role != "rollout"]
    return others if any(is_up(plan) for plan in rollouts) else others + rollouts


def _is_recovering(plan: GangPlan, status: RLJobStatus) -> bool:
    """Return True if the gang was restarted since the last start or resume of the job."""
    restarted, start = plan.status.last_restart_time, status.start_time
    return restarted is not None and (start is None or clock.parse(restarted) >= clock.parse(start))


def overdue(pods: Sequence[KubeObject], now: datetime) -> str:
    """Return the first pod that has outlived its grace period, and what will happen to it.

    The next attempt of its gang waits for it, because two attempts never overlap. Empty if there is
    no such pod.
    """
    late = (pod for pod in pods if podstate.is_terminating(pod) and now >= grace_end(pod))
    pod = next(late, None)
    if pod is None:
        return ""
    name, moment = podstate.name(pod), force_time(pod)
    if podstate.is_finished(pod):
        kept = ", ".join(pod["metadata"].get("finalizers") or ["none is named"])
        return f"{name} has ended, but its finalizers keep it ({kept})"
    if now < moment:
        return (
            f"{name} was deleted but did not end in its grace period: its node may be dead; "
            f"the operator deletes it by force at {clock.text(moment)}"
        )
    if finalizers := pod["metadata"].get("finalizers"):
        return f"{name} was deleted by force, but its finalizers keep it ({', '.join(finalizers)})"
    return f"{name} is being deleted by force"
