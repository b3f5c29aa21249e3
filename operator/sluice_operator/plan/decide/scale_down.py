"""Gangs that the spec no longer asks for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import cast

from sluice.api import GangStatus, RLJobStatus, RoleName
from sluice_operator.plan.decide.deletion import deletions
from sluice_operator.plan.decide.gangs import GangPlan, by_gang, retire
from sluice_operator.plan.facts.model import Gang, KubeObject


def retired_gangs(
    status: RLJobStatus, desired: Sequence[Gang], pods: Sequence[KubeObject], now: datetime
) -> list[GangPlan]:
    """Retire every gang that has a status or pods and is not desired.

    A retired gang moves to its next attempt number and loses its pods.
    """
    keep = {(gang.role, gang.replica) for gang in desired}
    members = by_gang(pods)
    # A gang without a status has pods only if the status was lost.
    without_status = {
        (cast(RoleName, role), replica): GangStatus(replica=replica, attempt=1)
        for role, replica in members
    }
    stored = {(role.name, gang.replica): gang for role in status.roles for gang in role.gangs}
    plans = []
    for (role, replica), gang_status in (without_status | stored).items():
        if (role, replica) not in keep:
            gang = Gang(role, replica, 1)
            left = members[role, replica]
            plans.append(
                GangPlan(gang, retire(gang_status, left, now), delete=deletions(left, now))
            )
    return plans
