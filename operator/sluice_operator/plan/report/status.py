"""Assembles RLJob.status from the decisions of a pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, get_args

from sluice.api import LastFailure, RLJobStatus, RoleName, RoleStatus
from sluice_operator.plan.decide.gangs import GangPlan
from sluice_operator.plan.decide.restart import GiveUp, Restart
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import Progress
from sluice_operator.plan.facts.names import leaders, selector_text
from sluice_operator.plan.facts.podstate import headline
from sluice_operator.plan.report.conditions import ConditionUpdate, summary, updated

_LONGEST_NOTE = 2048


def with_progress(status: RLJobStatus, progress: Progress | None, now: datetime) -> RLJobStatus:
    """Return the status with the buffer's answer.

    Fields that the answer lacks keep their values, so a buffer that restarts hides no progress.
    """
    if progress is None:
        return status
    update: dict[str, Any] = {"step": progress.step}
    if progress.step != (status.step or 0):
        update["last_progress_time"] = clock.text(now)
    if progress.total_steps is not None:
        update["total_steps"] = progress.total_steps
    if progress.reward is not None:
        update |= {"reward": f"{progress.reward:.4g}", "loss": None}
    elif progress.loss is not None:
        update["loss"] = f"{progress.loss:.4g}"
    if progress.version is not None:
        update["weight_version"] = progress.version
    if progress.lag is not None:
        update["policy_lag"] = f"{progress.lag:.2f}"
    return status.model_copy(update=update)


def with_note(status: RLJobStatus, note: str) -> RLJobStatus:
    """Return the status with the note at the end of the message of Running, once."""
    running, end = status.condition("Running"), f"; {note[:_LONGEST_NOTE]}"
    if not note or running is None or running.message.endswith(end):
        return status
    with_end = running.model_copy(update={"message": f"{running.message}{end}"})
    conditions = [
        with_end if condition is running else condition for condition in status.conditions
    ]
    return status.model_copy(update={"conditions": conditions})


def roles(
    status: RLJobStatus, plans: Sequence[GangPlan], retired: Sequence[GangPlan] = ()
) -> list[RoleStatus]:
    """Return one entry for each role.

    `desired` and `ready` count pods. `restarts` only grows, whatever happens to the gangs.
    """
    return [_role(name, status, plans, retired) for name in get_args(RoleName)]


def _role(
    name: RoleName, status: RLJobStatus, plans: Sequence[GangPlan], retired: Sequence[GangPlan]
) -> RoleStatus:
    before = next((role for role in status.roles if role.name == name), RoleStatus(name=name))
    present = [plan for plan in plans if plan.gang.role == name]
    gangs = [
        plan.status for plan in [*present, *(plan for plan in retired if plan.gang.role == name)]
    ]
    return RoleStatus(
        name=name,
        desired=sum(plan.gang.size for plan in present),
        ready=sum(plan.facts.ready for plan in present),
        attempt=max((gang.attempt for gang in gangs), default=0),
        restarts=before.restarts + sum(map(_counts_as_restart, present)),
        gangs=sorted(gangs, key=lambda gang: gang.replica),
    )


def _counts_as_restart(plan: GangPlan) -> bool:
    return isinstance(plan.decision, Restart) and plan.decision.failure is not None


def last_failure(status: RLJobStatus, plans: Sequence[GangPlan]) -> LastFailure | None:
    """Return the newest failure, or the one that ended the job."""
    ends = [plan.decision.failure for plan in plans if isinstance(plan.decision, GiveUp)]
    if ends:
        return counted(ends[0], status.last_failure)
    of_restarts = [plan.decision.failure for plan in plans if isinstance(plan.decision, Restart)]
    failures = [failure for failure in of_restarts if failure is not None]
    if not failures:
        return status.last_failure
    newest = max(failures, key=lambda failure: clock.parse(failure.time))
    return counted(newest, status.last_failure)


def counted(failure: LastFailure, before: LastFailure | None) -> LastFailure:
    """Return the failure, with how many times in a row the same cause has occurred.

    A failure that is read again in another pass does not count twice.
    """
    if before is None or before.model_copy(update={"times": failure.times}) == failure:
        return before or failure
    times = before.times + 1 if _cause(before) == _cause(failure) else 1
    return failure.model_copy(update={"times": times})


def _cause(failure: LastFailure) -> tuple[str, str, str]:
    # Without numbers: ports, sizes and process ids differ each time.
    return failure.role, failure.container, re.sub(r"\d+", "#", headline(failure))


def assembled(
    current: JobPass,
    role_list: list[RoleStatus],
    updates: Sequence[ConditionUpdate],
    **fields: Any,
) -> RLJobStatus:
    """Return the new status: these roles, conditions and further fields."""
    job = current.job
    conditions = updated(current.status, updates, job.metadata.generation, current.now)
    changes: dict[str, Any] = {
        "observed_generation": job.metadata.generation,
        "conditions": conditions,
        **summary(conditions),
        "roles": role_list,
        "restarts": sum(role.restarts for role in role_list),
        "rollout_selector": selector_text(leaders(job)),
    }
    return current.status.model_copy(update=changes | fields)
