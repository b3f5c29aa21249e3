"""Whether pods wait for a queue. The clocks of a job's deadlines stand still until it may run, as while suspended."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.api import RLJob
from sluice_operator.plan import names, podstate
from sluice_operator.plan.conditions import Finding
from sluice_operator.plan.constants import ADMITTED, GATED
from sluice_operator.plan.gangs import Step
from sluice_operator.plan.model import KubeObject
from sluice_operator.plan.queueing import group_version, queues


def waits(job: RLJob, pod: KubeObject) -> bool:
    """The pod is gated; or it waits for a place where a scheduler gives a gang all of its places, or none."""
    if podstate.is_terminating(pod) or podstate.is_finished(pod):
        return False
    together = group_version(job) is not None and queues(job, podstate.role(pod))
    return podstate.is_gated(pod) or (together and not podstate.is_scheduled(pod))


def is_queued(job: RLJob, steps: Sequence[Step], pods: Sequence[KubeObject]) -> bool:
    """The job cannot begin, or go on, because its trainer waits, or all of its engines do."""
    waiting = {(podstate.role(pod), podstate.replica(pod)) for pod in pods if waits(job, pod)}
    by_role = {
        role: [(step.gang.role, step.gang.replica) in waiting for step in steps if step.gang.role == role]
        for role in ("trainer", "rollout")
    }
    return any(by_role["trainer"]) or (bool(by_role["rollout"]) and all(by_role["rollout"]))


def admitted(job: RLJob, pods: Sequence[KubeObject]) -> Finding:
    waiting = [pod for pod in pods if waits(job, pod)]
    if not waiting:
        return Finding("Admitted", "True", ADMITTED.name, ADMITTED.message)
    return Finding("Admitted", "False", GATED.name, GATED.text(count=len(waiting), detail=_why(job, waiting[0])))


def _why(job: RLJob, pod: KubeObject) -> str:
    """Where to look, or what the scheduler says."""
    policy = job.spec.pod_group_policy
    if policy is not None and policy.kueue is not None and queues(job, podstate.role(pod)):
        group = names.group_name(job, podstate.role(pod), podstate.replica(pod), podstate.attempt(pod))
        return f" {policy.kueue.queue_name}; see kubectl describe workload {group}"
    message = podstate.unscheduled_because(pod)
    return f"; {podstate.name(pod)}: {message}" if message else ""
