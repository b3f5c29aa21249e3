"""Reopening a finished job when a person asks for it, the only way back from a terminal state.

A failed job is tried again; a job that has succeeded is trained for more steps.
"""

from __future__ import annotations

from datetime import datetime

from sluice.api import RLJobStatus, RoleStatus
from sluice_operator.plan.decide.gangs import retire


def reopened(status: RLJobStatus, now: datetime) -> RLJobStatus:
    """Return the status of a job that continues after its end.

    Every gang gets a new attempt and a fresh restart budget. Counters and data are kept.
    """
    return status.model_copy(
        update={
            "conditions": [
                condition
                for condition in status.conditions
                if condition.type not in ("Failed", "Succeeded")
            ],
            "roles": [_reopened_role(role, now) for role in status.roles],
            "start_time": None,
            "queued_time": None,
            "completion_time": None,
        }
    )


def _reopened_role(role: RoleStatus, now: datetime) -> RoleStatus:
    gangs = [retire(gang, [], now).model_copy(update={"restarts": 0}) for gang in role.gangs]
    return role.model_copy(update={"gangs": gangs})
