"""Deletion of pods: the order, and how long each pod may take to end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sluice_operator.plan.facts import clock, names, podstate
from sluice_operator.plan.facts.constants import FORCE_DELETE_AFTER, GRACE
from sluice_operator.plan.facts.model import Deletion, KubeObject

# A rollout worker that is told to end returns its leases, with partial samples, to the buffer. So
# buffer and rendezvous stay until trainer and rollout have ended.
_DRAIN_STAGES = (("trainer", "rollout", *names.EPISODES), ("buffer",), ("rendezvous",))


def drain(pods: Sequence[KubeObject], now: datetime) -> tuple[Deletion, ...]:
    """Delete pods stage by stage, up to the first stage in which a pod still runs.

    Later stages follow in later passes. A pod that has ended is not waited for: its kubelet may
    take another minute to remove the object.
    """
    planned: tuple[Deletion, ...] = ()
    for roles in _DRAIN_STAGES:
        stage_pods = [pod for pod in pods if podstate.role(pod) in roles]
        planned += deletions(stage_pods, now)
        if to_drain(stage_pods):
            break
    return planned


def to_drain(pods: Sequence[KubeObject]) -> list[KubeObject]:
    """Return the pods of a finished job that still run.

    Pods that have ended stay until the job is deleted, for their logs.
    """
    return [pod for pod in pods if not (podstate.is_finished(pod) or podstate.has_left(pod))]


def deletions(
    pods: Sequence[KubeObject], now: datetime, at_most: int | None = None
) -> tuple[Deletion, ...]:
    """Delete these pods.

    Parameters
    ----------
    pods
        Pods in any state. One that is being deleted is skipped until its node counts as dead; then
        it is deleted by force. For a pod that a Sandbox owns, the Sandbox is deleted instead,
        because it would create the pod again.
    now
        The time of this pass.
    at_most
        Upper bound of the grace period in seconds.

    """
    planned = []
    for pod in pods:
        if podstate.sandbox(pod) and not podstate.is_terminating(pod):
            planned.append(Deletion(names.SANDBOX, podstate.sandbox(pod)))
        elif not podstate.is_terminating(pod):
            grace = _grace(pod) if at_most is None else min(_grace(pod), at_most)
            planned.append(Deletion("Pod", podstate.name(pod), grace))
        elif now >= force_time(pod) and pod.get("kind") != names.SANDBOX:
            planned.append(Deletion("Pod", podstate.name(pod), 0))
    return tuple(planned)


def _grace(pod: KubeObject) -> int:
    """Return the grace period that the pod was created with, in seconds."""
    seconds = pod.get("spec", {}).get("terminationGracePeriodSeconds")
    # At least 1, because 0 means deletion by force.
    return max(seconds if seconds is not None else GRACE.get(podstate.role(pod), 30), 1)


def exit_times(pods: Sequence[KubeObject]) -> list[datetime]:
    """Return when the grace periods of terminating pods end, and when the pods count as stuck."""
    leaving = [pod for pod in pods if podstate.is_terminating(pod)]
    return [moment(pod) for pod in leaving for moment in (grace_end, force_time)]


def grace_end(pod: KubeObject) -> datetime:
    # Kubernetes adds the grace period to the deletion timestamp.
    return clock.parse(pod["metadata"]["deletionTimestamp"])


def force_time(pod: KubeObject) -> datetime:
    """Return when a terminating pod is deleted by force."""
    return grace_end(pod) + timedelta(seconds=FORCE_DELETE_AFTER)
