"""A failed job is tried again, or one that has succeeded becomes longer, at a person's wish: the
one way back from a terminal state.
"""

from __future__ import annotations

from datetime import datetime

from sluice.api import RLJobStatus, RoleStatus
from sluice_operator.plan.decide.gangs import retire


def reopened(status: RLJobStatus, now: datetime) -> RLJobStatus:
    """The status of a job that starts again where it ended: new attempts, a fresh budget, its
    counts and data kept.
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
