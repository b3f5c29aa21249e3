"""The group by which a job is admitted, over the job's life: how large it is, when another follows,
when one is over.

A group's size is settled when its first pod is made: queues compare it between the pods. So a job
that is scaled keeps its group, and a job that was suspended, and has given its quota back, comes
back in another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sluice.api import PodGroupStatus, RLJob, RLJobStatus, RoleStatus
from sluice_operator.plan.decide.gangs import Step, by_gang, desired_gangs, retire
from sluice_operator.plan.facts import clock, names, podstate
from sluice_operator.plan.facts.constants import GIVE_BACK_SECONDS
from sluice_operator.plan.facts.model import Deletion, Gang, KubeObject, Observed, PodGroup
from sluice_operator.plan.manifests import queueing

WORKLOAD = "Workload"
"""Kueue's object for a group. In a plan its deletion stands for the group's end, by whichever way
Kueue offers."""


def shared_group(job: RLJob, status: RLJobStatus, observed: Observed) -> PodGroupStatus | None:
    """The group by which the job is admitted; None: the job asks for none."""
    if job.spec.pod_group_policy is None:
        return None
    known = status.pod_group or PodGroupStatus()
    if _has_begun(job, known, observed):
        return known
    replicas = min(job.spec.rollout.min_replicas, job.spec.replicas)
    services = queueing.holds_services(job)
    return known.model_copy(update={"replicas": replicas, "services": services})


def following(job: RLJob, status: RLJobStatus, observed: Observed) -> PodGroupStatus | None:
    """The group of a job that gives its quota back: the next one, once the present one has pods."""
    known = status.pod_group
    if known is None or not _has_begun(job, known, observed):
        return known
    services = queueing.holds_services(job)
    return known.model_copy(update={"number": known.number + 1, "services": services})


def wanted_gangs(job: RLJob, status: RLJobStatus, now: datetime) -> list[Gang]:
    """All gangs that the spec asks for; without further engines, once a queue has held the job for
    a while.

    They would keep what the job's own group waits for, and make nothing without a trainer. Not at
    once: a trainer that restarts is held for a moment too.
    """
    gangs, due = desired_gangs(job), give_back_time(status)
    if status.pod_group is None or due is None or now < due:
        return gangs
    return [gang for gang in gangs if not _is_further(gang, status.pod_group)]


def give_back_time(status: RLJobStatus) -> datetime | None:
    """When a job that waits in a queue gives back what its further engines have;
    None: it does not wait.
    """
    since = clock.parse_optional(status.queued_time)
    return since + timedelta(seconds=GIVE_BACK_SECONDS) if since else None


def in_order(
    shared: PodGroupStatus | None, steps: Sequence[Step], pods: Sequence[KubeObject]
) -> list[Step]:
    """The steps; further engines are made only when the job's own group has its places, which they
    could take.
    """
    members = by_gang(pods)
    if shared is None or all(
        _is_placed(step, members[step.gang.role, step.gang.replica])
        for step in steps
        if queueing.is_shared(step.gang, shared)
    ):
        return [*steps]
    return [replace(step, create=()) if _is_further(step.gang, shared) else step for step in steps]


def _is_further(gang: Gang, shared: PodGroupStatus) -> bool:
    return gang.role == "rollout" and not queueing.is_shared(gang, shared)


def _is_placed(step: Step, pods: Sequence[KubeObject]) -> bool:
    present = [pod for pod in pods if podstate.attempt(pod) == step.status.attempt]
    return sum(map(podstate.is_scheduled, present)) >= step.gang.size


def _has_begun(job: RLJob, known: PodGroupStatus, observed: Observed) -> bool:
    name = names.group_name(job, known.number)
    return (queueing.KIND, name) in observed.objects or any(
        podstate.group(pod) == name for pod in observed.pods
    )


def renewed(job: RLJob, status: RLJobStatus, observed: Observed, now: datetime) -> RLJobStatus:
    """The status with another group, and new attempts for it, where the present one cannot be whole
    any more.
    """
    known = status.pod_group
    if known is None or job.spec.pod_group_policy is None:
        return status
    name = names.group_name(job, known.number)
    inside = [pod for pod in observed.pods if podstate.group(pod) == name]
    attempts = {
        (str(role.name), gang.replica): gang.attempt for role in status.roles for gang in role.gangs
    }
    present = [pod for pod in observed.pods if podstate.attempt(pod) == attempts.get(_gang(pod))]
    replaced = [pod for pod in inside if podstate.attempt(pod) < attempts.get(_gang(pod), 0)]
    if not (_is_spoiled(job, replaced) or (inside and _is_split(known, name, present))):
        return status
    new = following(job, status, observed) or known
    roles = [_moved(role, new, observed.pods, now) for role in status.roles]
    return status.model_copy(update={"pod_group": new, "roles": roles})


def _is_spoiled(job: RLJob, replaced: Sequence[KubeObject]) -> bool:
    """A pod that has ended well is replaced, as where a trainer's other pods failed.

    For Kueue it is done for ever: it would delete each replacement as one pod too many.
    """
    policy = job.spec.pod_group_policy
    return (
        policy is not None
        and policy.kueue is not None
        and any(map(podstate.is_succeeded, replaced))
    )


def _is_split(known: PodGroupStatus, name: str, present: Sequence[KubeObject]) -> bool:
    """A gang of the group has pods that are not in it, as those that an older release has made: it
    is never whole.
    """
    return any(
        podstate.group(pod) != name
        and queueing.is_shared(Gang(podstate.role(pod), podstate.replica(pod), 1), known)  # type: ignore[arg-type]
        for pod in present
    )


def _gang(pod: KubeObject) -> tuple[str, int]:
    return podstate.role(pod), podstate.replica(pod)


def _moved(
    role: RoleStatus, group: PodGroupStatus, pods: Sequence[KubeObject], now: datetime
) -> RoleStatus:
    """The role, with another attempt of each gang that belongs into this group."""
    members = by_gang(pods)
    gangs = [
        retire(gang, members[role.name, gang.replica], now)
        if queueing.is_shared(Gang(role.name, gang.replica, 1), group)
        else gang
        for gang in role.gangs
    ]
    return role.model_copy(update={"gangs": gangs})


def ends(pods: Sequence[KubeObject], present: Collection[str] = ()) -> tuple[Deletion, ...]:
    """The groups that Kueue has to be told the end of: nobody will join them any more, and none of
    their pods runs.

    Kueue waits for replacements else, and keeps quota and pods for them. present: groups that go
    on. pods: all of the job's, those too that only Kueue's finalizer keeps.
    """
    return tuple(
        Deletion(WORKLOAD, name)
        for name, members in sorted(of_groups(pods).items())
        if name not in present and _is_over(members) and _is_kept(members)
    )


def of_groups(pods: Sequence[KubeObject]) -> Mapping[str, list[KubeObject]]:
    """The pods that queue, by group."""
    groups: dict[str, list[KubeObject]] = defaultdict(list)
    for pod in pods:
        if podstate.group(pod):
            groups[podstate.group(pod)].append(pod)
    return groups


def _is_over(pods: Sequence[KubeObject]) -> bool:
    return all(podstate.is_finished(pod) or podstate.has_left(pod) for pod in pods)


def _is_kept(pods: Sequence[KubeObject]) -> bool:
    """Kueue keeps the pods, and does not know yet that their group has ended."""
    kept = any(map(podstate.is_kept, pods))
    return kept and not (all_ended(pods) and any(podstate.ends_group(pod) for pod in pods))


def all_ended(pods: Sequence[KubeObject]) -> bool:
    """Each has run, to its end. A pod that was deleted behind its gate has not, and Kueue waits for
    it all the same.
    """
    return all(map(podstate.is_finished, pods))


def group_objects(
    job: RLJob, groups: Mapping[Gang, PodGroup | None], pods: Mapping[Gang, Sequence[KubeObject]]
) -> list[KubeObject]:
    """The objects of these groups, where the job's queue wants some. pods: those of each gang."""
    objects = []
    for group in dict.fromkeys(group for group in groups.values() if group is not None):
        members = sorted(
            (gang for gang in groups if groups[gang] == group),
            key=lambda gang: gang.role != "trainer",
        )
        wanted = queueing.group_object(job, group, [pod for gang in members for pod in pods[gang]])
        objects += [wanted] if wanted else []
    return objects
