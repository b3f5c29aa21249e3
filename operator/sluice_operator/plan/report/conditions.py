"""Conditions, in Kubernetes' sense, and the one word for people that is derived from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Literal

from sluice.api import Condition, ConditionType, RLJobStatus
from sluice_operator.plan.decide.gangs import Step, by_gang
from sluice_operator.plan.facts import clock
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
from sluice_operator.plan.facts.model import KubeObject, Progress, Warned
from sluice_operator.plan.facts.podstate import headline
from sluice_operator.plan.report.blocked import blocked
from sluice_operator.plan.report.overdue import overdue

Value = Literal["True", "False", "Unknown"]
_ORDER: tuple[ConditionType, ...] = (
    "Admitted",
    "Running",
    "WeightsInSync",
    "Suspended",
    "Succeeded",
    "Failed",
)
_STANDSTILLS: tuple[ConditionType, ...] = ("Succeeded", "Failed", "Suspended")
_MESSAGE_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """The present content of a condition."""

    type: ConditionType
    status: Value
    reason: str
    message: str


def updated(
    status: RLJobStatus, findings: Sequence[Finding], generation: int, now: datetime
) -> list[Condition]:
    """The status's conditions with these findings;
    lastTransitionTime moves only where `status` changes.
    """
    by_type = {condition.type: condition for condition in status.conditions}
    for finding in findings:
        before = by_type.get(finding.type)
        same = before is not None and before.status == finding.status
        by_type[finding.type] = Condition(
            type=finding.type,
            status=finding.status,
            reason=finding.reason,
            message=finding.message[:_MESSAGE_LIMIT],
            last_transition_time=before.last_transition_time
            if same and before
            else clock.text(now),
            observed_generation=generation,
        )
    return [by_type[kind] for kind in _ORDER if kind in by_type]


def state_word(conditions: Sequence[Condition]) -> str:
    """Pending, Queued, Starting, Running, Restarting, Suspended, Succeeded or Failed."""
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
    """Fields of the status that say in two words how the job is: `state`, and the reason of it."""
    decisive = _decisive(conditions)
    return {"state": state_word(conditions), "reason": decisive.reason if decisive else ""}


def _decisive(conditions: Sequence[Condition]) -> Condition | None:
    """The condition that matters most: how the job ended, that it is suspended, or else Running."""
    by_type = {condition.type: condition for condition in conditions}
    ends = (by_type.get(kind) for kind in _STANDSTILLS)
    return next((end for end in ends if end and end.status == "True"), by_type.get("Running"))


def running(
    status: RLJobStatus,
    steps: Sequence[Step],
    pods: Sequence[KubeObject],
    progress: Progress | None,
    now: datetime,
    *,
    queued: str | None = None,
    warned: Mapping[str, Warned] | None = None,
    may_compile: bool = False,
) -> Finding:
    """True while the job can train: trainer, buffer, rendezvous and at least one engine are ready,
    and began to work.

    A rollout replica that is down while another serves is no matter of this condition: training
    goes on. queued: why a queue has not admitted the job, as far as that is known; None: no queue
    holds it. warned: as Observed has it. may_compile: engines find no kernels in a `kernelCache`.
    """
    if queued is not None:
        return Finding(
            "Running", "False", QUEUED.name, QUEUED.text(detail=f": {queued}" if queued else "")
        )
    missing = [step for step in _required(steps) if not is_up(step)]
    ready = sum(step.facts.ready for step in steps)
    desired = sum(step.gang.size for step in steps)
    trouble = blocked(pods, warned or {})
    recovering = [step for step in missing if _is_recovering(step, status)]
    if recovering:
        gangs = ", ".join(
            f"{step.gang.name} (attempt {step.status.attempt})" for step in recovering
        )
        causes = (
            _staying(recovering, pods, now),
            trouble.text() if trouble else _last_failure(status),
        )
        text = RESTARTING.text(gangs=gangs, detail=_detail("; ".join(filter(None, causes))))
        return Finding("Running", "False", RESTARTING.name, text)
    if any(step.facts.running + step.facts.succeeded < step.gang.size for step in missing):
        text = PENDING.text(
            ready=ready, desired=desired, detail=_detail(trouble.text() if trouble else "")
        )
        return Finding("Running", "False", PENDING.name, text)
    fresh = status.last_progress_time is None
    unready = [step.gang.name for step in missing if step.gang.role != "rollout"]
    if unready:
        return Finding(
            "Running",
            "False",
            STARTING.name,
            STARTING.text(waiting=f"waiting for {', '.join(unready)}"),
        )
    if fresh and not missing and progress is None:
        return Finding("Running", "False", UNREACHABLE.name, UNREACHABLE.message)
    # A job that runs goes on running while its engines take their next weights.
    first = fresh and not status.is_true("Running")
    if missing or (first and progress is not None and progress.engines_in_sync == 0):
        return Finding(
            "Running",
            "False",
            STARTING.name,
            STARTING.text(waiting=_engines(progress, may_compile=may_compile)),
        )
    return Finding("Running", "True", RUNNING.name, RUNNING.text(ready=ready, desired=desired))


def _engines(progress: Progress | None, *, may_compile: bool) -> str:
    """The next thing to come of the engines, of which none can generate yet."""
    if progress is None:
        return "no engine is ready yet"
    if progress.engines:
        return f"no engine holds the weights yet{_detail(progress.dropped)}"
    text = "no engine has started yet"
    if may_compile:
        text += ", which takes minutes where kernels are compiled first (kernelCache keeps them)"
    return text


def _staying(steps: Sequence[Step], pods: Sequence[KubeObject], now: datetime) -> str:
    """The pod for whose end one of these gangs waits too long."""
    members = by_gang(pods)
    gangs = (members[step.gang.role, step.gang.replica] for step in steps)
    return overdue(list(chain.from_iterable(gangs)), now)


def _detail(text: str) -> str:
    return f"; {text}" if text else ""


def _last_failure(status: RLJobStatus) -> str:
    """A pod that fails again and again waits, most of the time, for its next attempt: say what it
    failed of.
    """
    failure = status.last_failure
    if failure is None:
        return ""
    return "; ".join(filter(None, (f"{failure.pod}: {headline(failure)}", hopeless(status))))


def hopeless(status: RLJobStatus) -> str:
    """That trying again will not help, where the start has failed in the same way several times;
    else empty.
    """
    failure = status.last_failure
    if failure is None or failure.times < HOPELESS_AFTER or status.last_progress_time is not None:
        return ""
    return HOPELESS.format(times=failure.times)


def weights_in_sync(progress: Progress | None) -> Finding:
    if progress is None:
        return Finding("WeightsInSync", "Unknown", SYNC_UNKNOWN.name, SYNC_UNKNOWN.message)
    if progress.engines == 0:
        return Finding("WeightsInSync", "False", NO_ENGINES.name, NO_ENGINES.message)
    if progress.engines_in_sync < progress.engines:
        text = OUT_OF_SYNC.text(detail=_detail(progress.dropped))
        return Finding("WeightsInSync", "False", OUT_OF_SYNC.name, text)
    return Finding("WeightsInSync", "True", IN_SYNC.name, IN_SYNC.message)


def is_up(step: Step) -> bool:
    return step.facts.ready + step.facts.succeeded >= step.gang.size


def _required(steps: Sequence[Step]) -> list[Step]:
    """The gangs without which nothing is trained; of the rollout replicas any one will do."""
    rollouts = [step for step in steps if step.gang.role == "rollout"]
    others = [step for step in steps if step.gang.role != "rollout"]
    return others if any(is_up(step) for step in rollouts) else others + rollouts


def _is_recovering(step: Step, status: RLJobStatus) -> bool:
    """The gang was restarted since the job's (last) start;
    after a resume everything is merely pending.
    """
    restarted, start = step.status.last_restart_time, status.start_time
    return restarted is not None and (start is None or clock.parse(restarted) >= clock.parse(start))
