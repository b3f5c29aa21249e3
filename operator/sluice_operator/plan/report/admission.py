"""The condition Admitted: do pods wait for a queue, and why.

The clocks of a job's deadlines stand still until it may run, as while suspended.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.api import RLJob
from sluice_operator.plan import podstate
from sluice_operator.plan.constants import ADMITTED, GATED
from sluice_operator.plan.decide.gangs import Step
from sluice_operator.plan.manifests.podgroup import WORKLOAD
from sluice_operator.plan.manifests.queueing import group_version, queues
from sluice_operator.plan.model import KubeObject, Observed
from sluice_operator.plan.report.conditions import Finding

_ASKED = ("QuotaReserved", "Admitted")
"""Conditions of Kueue's Workload, in the order in which they come true."""


def waits(job: RLJob, pod: KubeObject) -> bool:
    """The pod is gated; or it waits for a place where a scheduler gives a gang all of its places,
    or none.
    """
    if podstate.is_terminating(pod) or podstate.is_finished(pod):
        return False
    together = group_version(job) is not None and queues(job, podstate.role(pod))
    return podstate.is_gated(pod) or (together and not podstate.is_scheduled(pod))


def waiting(job: RLJob, pods: Sequence[KubeObject]) -> list[KubeObject]:
    """The pods that wait; those of the trainer, and of the first engines, first."""
    return sorted(
        (pod for pod in pods if waits(job, pod)),
        key=lambda pod: (
            podstate.role(pod) != "trainer",
            podstate.replica(pod),
            podstate.index(pod),
        ),
    )


def is_queued(job: RLJob, steps: Sequence[Step], pods: Sequence[KubeObject]) -> bool:
    """The job cannot begin, or go on, because its trainer waits, or all of its engines do."""
    gangs = {(podstate.role(pod), podstate.replica(pod)) for pod in waiting(job, pods)}
    by_role = {
        role: [
            (step.gang.role, step.gang.replica) in gangs for step in steps if step.gang.role == role
        ]
        for role in ("trainer", "rollout")
    }
    return any(by_role["trainer"]) or (bool(by_role["rollout"]) and all(by_role["rollout"]))


def admitted(job: RLJob, observed: Observed) -> Finding:
    pods = waiting(job, observed.pods)
    if not pods:
        return Finding("Admitted", "True", ADMITTED.name, ADMITTED.message)
    return Finding(
        "Admitted",
        "False",
        GATED.name,
        GATED.text(count=len(pods), detail=_where(job, pods, observed)),
    )


def cause(job: RLJob, observed: Observed) -> str:
    """Why the first of the pods that wait does, in the queue's or the scheduler's own words; empty:
    nobody says.
    """
    pods = waiting(job, observed.pods)
    if not pods:
        return ""
    workload = observed.objects.get((WORKLOAD, podstate.group(pods[0])))
    if workload is not None:
        return _words(workload)
    message = "" if podstate.is_gated(pods[0]) else podstate.unscheduled_because(pods[0])
    return f"{podstate.name(pods[0])}: {message}" if message else ""


def _where(job: RLJob, pods: Sequence[KubeObject], observed: Observed) -> str:
    """The queue and its words, and where to look."""
    policy, words = job.spec.pod_group_policy, cause(job, observed)
    if policy is None or policy.kueue is None or not podstate.group(pods[0]):
        return f"; {words}" if words else ""
    told = f": {words}" if words else ""
    return (
        f" {policy.kueue.queue_name}{told}; see kubectl describe workload {podstate.group(pods[0])}"
    )


def _words(workload: KubeObject) -> str:
    """Words for what a Workload lacks for its admission."""
    conditions = {
        each["type"]: each for each in (workload.get("status") or {}).get("conditions") or []
    }
    unmet = (
        conditions[kind]
        for kind in _ASKED
        if kind in conditions and conditions[kind]["status"] != "True"
    )
    return next((str(each.get("message", "")).strip() for each in unmet), "")
