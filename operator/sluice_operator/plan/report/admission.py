"""The condition Admitted: whether pods wait for a queue, and why.

The clocks of a job's deadlines stop while a queue holds it, as they do while it is suspended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sluice.api import RLJob
from sluice_operator.plan.decide.gangs import GangPlan
from sluice_operator.plan.decide.pod_groups import group_version, queues
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.constants import ADMITTED, GATED, POOL_PATIENCE
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import KubeObject, Observed
from sluice_operator.plan.report import remedies
from sluice_operator.plan.report.conditions import ConditionUpdate

# Conditions of Kueue's Workload, in the order in which they come true.
_AWAITED = ("QuotaReserved", "Admitted")
# Reason with which Kueue evicts a Workload whose pods were not ready in time (waitForPodsReady).
_NOT_READY = "PodsReadyTimeout"
_QUEUED_SEPARATELY = (
    "Kueue queues each pod of this job separately, so jobs can block each other: set "
    "podGroupPolicy.kueue.queueName"
)
_OUTSIDE_GROUP = (
    "this pod is not in the job's group, which an older release has made: suspend and resume the "
    "job"
)
_EPISODE_QUOTA = (
    "episode pods need quota in addition to the job's: give them another queue, with the label "
    "kueue.x-k8s.io/queue-name in rollout.environment.template"
)


def waits(job: RLJob, pod: KubeObject) -> bool:
    """Return True if the pod is gated, or waits until its whole gang can be scheduled."""
    if not _goes_on(pod):
        return False
    gang_scheduled = group_version(job) is not None and queues(job, podstate.role(pod))
    return podstate.is_gated(pod) or (gang_scheduled and not podstate.is_scheduled(pod))


def waiting(job: RLJob, observed: Observed, now: datetime) -> list[KubeObject]:
    """Return the pods that wait: the trainer's, the other gangs' by replica, then the episodes'."""
    pods = sorted(
        (pod for pod in observed.pods if waits(job, pod)),
        key=lambda pod: (
            podstate.role(pod) != "trainer",
            podstate.replica(pod),
            podstate.index(pod),
        ),
    )
    return pods + held_episodes(observed.episodes, now)


def held_episodes(episodes: Sequence[KubeObject], now: datetime) -> list[KubeObject]:
    """Return the pods of each warm pool that a queue has held as a whole for a while.

    Pods of a pool come and go, each through its gate. If some of them run, the pool is only smaller
    than requested, and the job goes on.
    """
    held = []
    for role in names.EPISODES:
        pool = [pod for pod in episodes if podstate.role(pod) == role and _goes_on(pod)]
        if all(map(podstate.is_gated, pool)):
            held += [pod for pod in pool if podstate.age(pod, now) >= POOL_PATIENCE]
    return held


def _goes_on(pod: KubeObject) -> bool:
    return not (podstate.is_terminating(pod) or podstate.is_finished(pod))


def is_queued(current: JobPass, plans: Sequence[GangPlan]) -> bool:
    """Return True if a queue keeps the job from starting or continuing.

    It does if it holds a pod of a gang that the job cannot do without, all of its engines, or all
    of its episodes.
    """
    pods = waiting(current.job, current.observed, current.now)
    gangs = {(podstate.role(pod), podstate.replica(pod)) for pod in pods}
    held = {plan.gang: (plan.gang.role, plan.gang.replica) in gangs for plan in plans}
    engines = [is_held for gang, is_held in held.items() if gang.role == "rollout"]
    return (
        any(is_held for gang, is_held in held.items() if gang.role != "rollout")
        or (bool(engines) and all(engines))
        or any(podstate.role(pod) in names.EPISODES for pod in pods)
    )


def admitted(current: JobPass) -> ConditionUpdate:
    pods = waiting(current.job, current.observed, current.now)
    if not pods:
        return ConditionUpdate("Admitted", "True", ADMITTED.name, ADMITTED.message)
    first, others = pods[0], len(pods) - 1
    name = podstate.name(first)
    text = GATED.text(
        pods=f"{name} and {others} more wait" if others else f"{name} waits",
        queue=f"queue {podstate.queue(first)}" if podstate.queue(first) else "a queue",
        detail=_details(current.job, first, current.observed),
    )
    return ConditionUpdate("Admitted", "False", GATED.name, text)


def cause(current: JobPass) -> str:
    """Return why the first of the waiting pods waits, as the queue or the scheduler says it.

    Empty if no pod waits, or if no cause is reported.
    """
    pods = waiting(current.job, current.observed, current.now)
    if not pods:
        return ""
    pod, report = pods[0], _report(pods[0], current.observed)
    # The Workload of a group speaks of the whole job.
    if podstate.group(pod) and podstate.is_gated(pod):
        return report
    in_queue = f" in queue {podstate.queue(pod)}" if podstate.queue(pod) else ""
    text = "; ".join(filter(None, (report, _remedy(current.job, pod))))
    return f"{podstate.name(pod)}{in_queue}: {text}" if text else ""


def _details(job: RLJob, pod: KubeObject, observed: Observed) -> str:
    """Return what the queue reports, which object to look at, and what to do."""
    workload, report = workload_of(pod, observed.objects), _report(pod, observed)
    name = workload["metadata"]["name"] if workload else _group_in_kueue(job, pod)
    look = f"see kubectl describe workload {name}" if name else ""
    more = "".join(f"; {text}" for text in (look, _remedy(job, pod)) if text)
    return (f": {report}" if report else "") + more


def _group_in_kueue(job: RLJob, pod: KubeObject) -> str:
    policy = job.spec.pod_group_policy
    return podstate.group(pod) if policy is not None and policy.kueue is not None else ""


def workload_of(
    pod: KubeObject, objects: Mapping[tuple[str, str], KubeObject]
) -> KubeObject | None:
    """Return Kueue's Workload for this pod: its group's, or one that the pod itself owns."""
    if podstate.group(pod):
        return objects.get((names.WORKLOAD, podstate.group(pod)))
    uid = pod["metadata"].get("uid")
    return next(
        (
            stored
            for (kind, _), stored in objects.items()
            if kind == names.WORKLOAD
            and any(owner["uid"] == uid for owner in stored["metadata"].get("ownerReferences", []))
        ),
        None,
    )


def _report(pod: KubeObject, observed: Observed) -> str:
    """Return what the queue or the scheduler says about the pod."""
    workload = workload_of(pod, observed.objects)
    if workload is not None:
        return remedies.with_remedy(_workload_report(workload), remedies.QUEUEING)
    if not podstate.is_gated(pod):
        return podstate.unscheduled_because(pod)
    foreign = [gate for gate in podstate.gates(pod) if gate not in names.GATES_OF_KUEUE]
    return f"scheduling gate {', '.join(foreign)}" if foreign else ""


def _remedy(job: RLJob, pod: KubeObject) -> str:
    """Return what a user can do about a pod that Kueue queues without its job."""
    if podstate.group(pod) or not set(podstate.gates(pod)) & set(names.GATES_OF_KUEUE):
        return ""
    if podstate.role(pod) in names.EPISODES:
        return _EPISODE_QUOTA
    policy = job.spec.pod_group_policy
    in_kueue = policy is not None and policy.kueue is not None
    return _OUTSIDE_GROUP if in_kueue else _QUEUED_SEPARATELY


def _workload_report(workload: KubeObject) -> str:
    """Return what a Workload lacks for its admission, and why it was evicted if that can recur."""
    conditions = {
        condition["type"]: condition
        for condition in (workload.get("status") or {}).get("conditions") or []
    }
    evicted = conditions.get("Evicted") or {}
    is_evicted = evicted.get("status") == "True"
    if (workload.get("spec") or {}).get("active") is False:
        return str(evicted["message"] if is_evicted else "The workload is deactivated")
    unmet = [
        str(conditions[kind].get("message", "")).strip()
        for kind in _AWAITED
        if kind in conditions and conditions[kind]["status"] != "True"
    ]
    messages = unmet[:1]
    if is_evicted and evicted.get("reason") == _NOT_READY and evicted["message"] not in messages:
        messages.insert(0, str(evicted["message"]))
    return "; ".join(filter(None, messages))
