"""Pods that a job misses: seen once, and not there."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.api import RLJob
from sluice_operator.plan.decide.gangs import by_gang, desired_gangs
from sluice_operator.plan.facts import podstate
from sluice_operator.plan.facts.model import KubeObject


def lacks_pods(job: RLJob, pods: Sequence[KubeObject]) -> bool:
    """A gang all of whose pods were seen (its `retryTime` is cleared) has fewer now.

    pods: the job's. A job that is suspended, or has ended, misses none.
    """
    status = job.status
    if (
        status is None
        or job.spec.suspend
        or status.is_true("Succeeded")
        or status.is_true("Failed")
    ):
        return False
    members = by_gang(pods)
    for gang in desired_gangs(job):
        known = status.gang(gang.role, gang.replica)
        if known is None or known.retry_time is not None:
            continue
        present = members[gang.role, gang.replica]
        if sum(podstate.attempt(pod) == known.attempt for pod in present) < gang.size:
            return True
    return False
