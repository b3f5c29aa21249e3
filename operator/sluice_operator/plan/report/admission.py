"""The condition Admitted: do pods wait for a queue, and why.

The clocks of a job's deadlines stand still until it may run, as while suspended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sluice.api import RLJob
from sluice_operator.plan.decide.gangs import Step
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.constants import ADMITTED, GATED, POOL_PATIENCE
from sluice_operator.plan.facts.model import KubeObject, Observed
from sluice_operator.plan.manifests.podgroup import WORKLOAD
from sluice_operator.plan.manifests.queueing import group_version, queues
from sluice_operator.plan.report import remedies
from sluice_operator.plan.report.conditions import Finding

_ASKED = ("QuotaReserved", "Admitted")
"""Conditions of Kueue's Workload, in the order in which they come true."""
_NOT_READY = "PodsReadyTimeout"
"""Why Kueue has evicted a Workload whose pods were not ready in time (waitForPodsReady)."""
_ALONE = (
    "Kueue queues each pod of this job apart, so jobs can wait for each other: set "
    "podGroupPolicy.kueue.queueName"
)
_OUTSIDE = "the job's group is of an older release and lacks this pod: suspend and resume the job"
_EPISODES = (
    "episodes need quota besides the jobs': name a queue of their own in "
    "rollout.environment.template, with label kueue.x-k8s.io/queue-name"
)


def waits(job: RLJob, pod: KubeObject) -> bool:
    """True if the pod is gated, or waits for a place where a scheduler gives a gang all of its
    places or none.
    """
    if not _goes_on(pod):
        return False
    together = group_version(job) is not None and queues(job, podstate.role(pod))
    return podstate.is_gated(pod) or (together and not podstate.is_scheduled(pod))


def waiting(job: RLJob, observed: Observed, now: datetime) -> list[KubeObject]:
    """The pods that wait: the trainer's first, then those of engines and services by replica, then
    those of episodes none of which may run.
    """
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
    """The pods of a pool that a queue holds as a whole, and has held for a while.

    Pods of a pool come and go, each through its gate. A pool of which some run is smaller than was
    asked for, and the job goes on.
    """
    held = []
    for role in names.EPISODES:
        pool = [pod for pod in episodes if podstate.role(pod) == role and _goes_on(pod)]
        if all(map(podstate.is_gated, pool)):
            held += [pod for pod in pool if podstate.age(pod, now) >= POOL_PATIENCE]
    return held


def _goes_on(pod: KubeObject) -> bool:
    return not (podstate.is_terminating(pod) or podstate.is_finished(pod))


def is_queued(job: RLJob, steps: Sequence[Step], observed: Observed, now: datetime) -> bool:
    """True if the job cannot begin, or go on, because a queue holds a pod of a gang that it cannot
    do without, all of its engines, or all of its episodes.
    """
    pods = waiting(job, observed, now)
    gangs = {(podstate.role(pod), podstate.replica(pod)) for pod in pods}
    held = {step.gang: (step.gang.role, step.gang.replica) in gangs for step in steps}
    engines = [is_held for gang, is_held in held.items() if gang.role == "rollout"]
    return (
        any(is_held for gang, is_held in held.items() if gang.role != "rollout")
        or (bool(engines) and all(engines))
        or any(podstate.role(pod) in names.EPISODES for pod in pods)
    )


def admitted(job: RLJob, observed: Observed, now: datetime) -> Finding:
    pods = waiting(job, observed, now)
    if not pods:
        return Finding("Admitted", "True", ADMITTED.name, ADMITTED.message)
    first, others = pods[0], len(pods) - 1
    who = podstate.name(first)
    text = GATED.text(
        pods=f"{who} and {others} more wait" if others else f"{who} waits",
        queue=f"queue {podstate.queue(first)}" if podstate.queue(first) else "a queue",
        detail=_details(job, first, observed),
    )
    return Finding("Admitted", "False", GATED.name, text)


def cause(job: RLJob, observed: Observed, now: datetime) -> str:
    """Why the first of the pods that wait does, in the queue's or the scheduler's own words; empty:
    nobody says.
    """
    pods = waiting(job, observed, now)
    if not pods:
        return ""
    pod, words = pods[0], _words(pods[0], observed)
    if podstate.group(pod) and podstate.is_gated(pod):
        return words  # of the whole job
    where = f" in queue {podstate.queue(pod)}" if podstate.queue(pod) else ""
    told = "; ".join(filter(None, (words, _cure(job, pod))))
    return f"{podstate.name(pod)}{where}: {told}" if told else ""


def _details(job: RLJob, pod: KubeObject, observed: Observed) -> str:
    """The queue's words, where to look, and what to do."""
    workload, words = workload_of(pod, observed.objects), _words(pod, observed)
    name = workload["metadata"]["name"] if workload else _group_in_kueue(job, pod)
    look = f"see kubectl describe workload {name}" if name else ""
    more = "".join(f"; {each}" for each in (look, _cure(job, pod)) if each)
    return (f": {words}" if words else "") + more


def _group_in_kueue(job: RLJob, pod: KubeObject) -> str:
    policy = job.spec.pod_group_policy
    return podstate.group(pod) if policy is not None and policy.kueue is not None else ""


def workload_of(
    pod: KubeObject, objects: Mapping[tuple[str, str], KubeObject]
) -> KubeObject | None:
    """Kueue's Workload of this pod: that of its group, or one of the pod alone, which it owns."""
    if podstate.group(pod):
        return objects.get((WORKLOAD, podstate.group(pod)))
    uid = pod["metadata"].get("uid")
    return next(
        (
            stored
            for (kind, _), stored in objects.items()
            if kind == WORKLOAD
            and any(owner["uid"] == uid for owner in stored["metadata"].get("ownerReferences", []))
        ),
        None,
    )


def _words(pod: KubeObject, observed: Observed) -> str:
    workload = workload_of(pod, observed.objects)
    if workload is not None:
        return remedies.with_cure(_of_workload(workload), remedies.OF_QUEUES)
    if not podstate.is_gated(pod):
        return podstate.unscheduled_because(pod)
    foreign = [gate for gate in podstate.gates(pod) if gate not in names.GATES_OF_KUEUE]
    return f"scheduling gate {', '.join(foreign)}" if foreign else ""


def _cure(job: RLJob, pod: KubeObject) -> str:
    """The cure: what a user can do about a pod that Kueue queues without its job."""
    if podstate.group(pod) or not set(podstate.gates(pod)) & set(names.GATES_OF_KUEUE):
        return ""
    if podstate.role(pod) in names.EPISODES:
        return _EPISODES
    policy = job.spec.pod_group_policy
    return _OUTSIDE if policy is not None and policy.kueue is not None else _ALONE


def _of_workload(workload: KubeObject) -> str:
    """The words of a Workload: what it lacks for its admission, and why Kueue took an earlier one
    back, if that can happen again.
    """
    conditions = {
        each["type"]: each for each in (workload.get("status") or {}).get("conditions") or []
    }
    evicted = conditions.get("Evicted") or {}
    is_evicted = evicted.get("status") == "True"
    if (workload.get("spec") or {}).get("active") is False:
        return str(evicted["message"] if is_evicted else "The workload is deactivated")
    unmet = [
        str(conditions[kind].get("message", "")).strip()
        for kind in _ASKED
        if kind in conditions and conditions[kind]["status"] != "True"
    ]
    words = unmet[:1]
    if is_evicted and evicted.get("reason") == _NOT_READY and evicted["message"] not in words:
        words.insert(0, str(evicted["message"]))
    return "; ".join(filter(None, words))
