"""Gangs that are not wanted any more."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import cast

from sluice.api import GangStatus, RLJobStatus, RoleName
from sluice_operator.plan.decide.gangs import (
    Step,
    by_gang,
    deletions,
    retire,
)
from sluice_operator.plan.facts.model import Gang, KubeObject


def retired_gangs(
    status: RLJobStatus, wanted: Sequence[Gang], pods: Sequence[KubeObject], now: datetime
) -> list[Step]:
    """Gangs that have a status, or pods, and are not wanted: they get their next attempt number and
    lose their pods.
    """
    keep = {(gang.role, gang.replica) for gang in wanted}
    members = by_gang(pods)
    unknown = {
        (cast(RoleName, role), replica): GangStatus(replica=replica, attempt=1)
        for role, replica in members
    }
    known = {(role.name, gang.replica): gang for role in status.roles for gang in role.gangs}
    steps = []
    for (role, replica), gang_status in (unknown | known).items():
        if (role, replica) not in keep:
            gang = Gang(role, replica, 1)
            left = members[role, replica]
            steps.append(Step(gang, retire(gang_status, left, now), delete=deletions(left, now)))
    return steps
