"""Assembles RLJob.status from what the policies found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sluice.api import ROLES, LastFailure, RLJob, RLJobStatus, RoleName, RoleStatus
from sluice_operator.plan.decide.gangs import Step
from sluice_operator.plan.decide.restart import GiveUp, Restart
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.model import Progress
from sluice_operator.plan.facts.names import leaders, selector_text
from sluice_operator.plan.facts.podstate import headline
from sluice_operator.plan.report.conditions import Finding, summary, updated

_LONGEST_NOTE = 2048


def with_progress(status: RLJobStatus, progress: Progress | None, now: datetime) -> RLJobStatus:
    """The status with the buffer's answer; what it does not tell stays, so that a restarting buffer
    hides nothing.
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
    """The note at the end of what the condition Running says, once."""
    running, end = status.condition("Running"), f"; {note[:_LONGEST_NOTE]}"
    if not note or running is None or running.message.endswith(end):
        return status
    told = running.model_copy(update={"message": f"{running.message}{end}"})
    conditions = [told if condition is running else condition for condition in status.conditions]
    return status.model_copy(update={"conditions": conditions})


def roles(
    status: RLJobStatus, steps: Sequence[Step], retired: Sequence[Step] = ()
) -> list[RoleStatus]:
    """One entry for each role. desired and ready count pods; restarts only grow, whatever happens
    to the gangs.
    """
    return [_role(name, status, steps, retired) for name in ROLES]  # type: ignore[arg-type]


def _role(
    name: RoleName, status: RLJobStatus, steps: Sequence[Step], retired: Sequence[Step]
) -> RoleStatus:
    before = next((role for role in status.roles if role.name == name), RoleStatus(name=name))
    wanted = [step for step in steps if step.gang.role == name]
    gangs = [
        step.status for step in [*wanted, *(step for step in retired if step.gang.role == name)]
    ]
    return RoleStatus(
        name=name,
        desired=sum(step.gang.size for step in wanted),
        ready=sum(step.facts.ready for step in wanted),
        attempt=max((gang.attempt for gang in gangs), default=0),
        restarts=before.restarts + sum(_counts(step) for step in wanted),
        gangs=sorted(gangs, key=lambda gang: gang.replica),
    )


def _counts(step: Step) -> int:
    return int(isinstance(step.decision, Restart) and step.decision.failure is not None)


def last_failure(status: RLJobStatus, steps: Sequence[Step]) -> LastFailure | None:
    """The newest failure; one that ended the job goes before all others."""
    ends = [step.decision.failure for step in steps if isinstance(step.decision, GiveUp)]
    if ends:
        return counted(ends[0], status.last_failure)
    of_restarts = [step.decision.failure for step in steps if isinstance(step.decision, Restart)]
    failures = [failure for failure in of_restarts if failure is not None]
    if not failures:
        return status.last_failure
    return counted(
        max(failures, key=lambda failure: clock.parse(failure.time)), status.last_failure
    )


def counted(failure: LastFailure, before: LastFailure | None) -> LastFailure:
    """The failure, with how often in a row it has had the same cause. A failure that is looked at
    again is no other.
    """
    if before is None or before.model_copy(update={"times": failure.times}) == failure:
        return before or failure
    times = before.times + 1 if _cause(before) == _cause(failure) else 1
    return failure.model_copy(update={"times": times})


def _cause(failure: LastFailure) -> tuple[str, str, str]:
    """The role and the cause of a failure, without numbers: ports, sizes and process ids are others
    each time.
    """
    return failure.role, failure.container, re.sub(r"\d+", "#", headline(failure))


def assembled(
    job: RLJob,
    status: RLJobStatus,
    role_list: list[RoleStatus],
    findings: Sequence[Finding],
    now: datetime,
    **update: Any,
) -> RLJobStatus:
    """The new status. update: further fields."""
    conditions = updated(status, findings, job.metadata.generation, now)
    changes: dict[str, Any] = {
        "observed_generation": job.metadata.generation,
        "conditions": conditions,
        **summary(conditions),
        "roles": role_list,
        "restarts": sum(role.restarts for role in role_list),
        "rollout_selector": selector_text(leaders(job)),
    }
    return status.model_copy(update=changes | update)
