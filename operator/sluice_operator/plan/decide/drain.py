"""Stopping pods in an order that loses nothing: workers first, then what they report to.

A rollout worker returns its leases, with partial samples, to the buffer when it is told to end; so
buffer and rendezvous stay until trainer and rollout have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sluice_operator.plan.decide.gangs import deletions
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import Deletion, KubeObject

_ORDER = (("trainer", "rollout", *names.EPISODES), ("buffer",), ("rendezvous",))


def drain(pods: Sequence[KubeObject], now: datetime) -> tuple[Deletion, ...]:
    """The deletions of the stages up to the first one in which a pod still runs; later ones follow
    when it has ended.

    An ended pod is not waited for: a kubelet may take a minute more until it takes the object away.
    """
    wanted: tuple[Deletion, ...] = ()
    for stage in _ORDER:
        stage_pods = [pod for pod in pods if podstate.role(pod) in stage]
        wanted += deletions(stage_pods, now)
        if to_drain(stage_pods):
            break
    return wanted


def to_drain(pods: Sequence[KubeObject]) -> list[KubeObject]:
    """Of a finished job: what still runs.

    Ended pods stay until the job is deleted, for their logs.
    """
    return [pod for pod in pods if not (podstate.is_finished(pod) or podstate.has_left(pod))]
