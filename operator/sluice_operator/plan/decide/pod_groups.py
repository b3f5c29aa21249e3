"""Gang admission: which pods a queue admits together, and how that group changes over a job's life.

sluice does not schedule pods. It groups them for what the cluster has: Kueue, Volcano, or
Kubernetes' own PodGroups.

A job is admitted as a whole. One group holds the trainer and the first `minReplicas` engines, and
replacements of their pods join it: if they were admitted apart, two jobs could each get half of
what they need and wait for ever. Each further engine is a group for each of its attempts, which may
be admitted or not without harm. With Kueue the job's group holds the buffer and the rendezvous too,
because a namespace with a LocalQueue `default` queues every pod, and pods outside a group are
admitted apart. Volcano and Kubernetes' scheduler queue only pods that ask for it, so there the
services start at once.

The size of a group is settled when its first pod is made, because queues compare it between the
pods. So a job that is scaled keeps its group. A job that was suspended has given its quota back and
returns in the next group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sluice.api import PodGroupStatus, RLJob, RLJobStatus, RoleStatus
from sluice_operator.plan.decide.gangs import GangPlan, by_gang, desired_gangs, retire
from sluice_operator.plan.facts import clock, names, podstate
from sluice_operator.plan.facts.constants import GIVE_BACK_SECONDS
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import Deletion, Gang, KubeObject, Observed, PodGroup

VOLCANO = "scheduling.volcano.sh/v1beta1"
NATIVE = "scheduling.k8s.io/v1beta1"
_QUEUED = ("trainer", "rollout")
SERVICES = ("buffer", "rendezvous")

# -- which group a pod belongs to


def queues(job: RLJob, role: str) -> bool:
    """Return True if pods of this role wait for a queue or for a gang scheduler."""
    if role in SERVICES:
        return holds_services(job)
    return job.spec.pod_group_policy is not None and role in _QUEUED


def holds_services(job: RLJob) -> bool:
    """Return True if the job's next group holds the buffer and the rendezvous too."""
    policy = job.spec.pod_group_policy
    return policy is not None and policy.kueue is not None


def group_version(job: RLJob) -> str | None:
    """Return the apiVersion of the job's PodGroup objects; None if it needs none."""
    policy = job.spec.pod_group_policy
    if policy is None or policy.kueue is not None:
        return None
    return VOLCANO if policy.volcano is not None else NATIVE


def in_job_group(gang: Gang, job_group: PodGroupStatus) -> bool:
    """Return True if the gang is in the group by which the job is admitted."""
    if gang.role in SERVICES:
        return job_group.services
    return gang.role == "trainer" or (gang.role == "rollout" and gang.replica < job_group.replicas)


def group_of(
    job: RLJob, gang: Gang, attempt: int, job_group: PodGroupStatus | None
) -> PodGroup | None:
    """Return the group of a gang's pods; None if they do not queue.

    Parameters
    ----------
    job, gang
        The gang and its job.
    attempt
        The gang's attempt number, which names the group of a further engine.
    job_group
        The group by which the job is admitted.

    """
    if job_group is None or not queues(job, gang.role):
        return None
    if not in_job_group(gang, job_group):
        # Groups that an older release has made do not hold the services.
        if gang.role in SERVICES:
            return None
        name = names.attempt_name(job, gang.role, gang.replica, attempt)
        return PodGroup(name, gang.size, alone=True)
    size = job.spec.trainer.nodes + job_group.replicas * job.spec.rollout.nodes_per_replica
    size += len(SERVICES) if job_group.services else 0
    return PodGroup(names.group_name(job, job_group.number), size)


def groups_of(current: JobPass, plans: Sequence[GangPlan]) -> dict[Gang, PodGroup | None]:
    """Return the group of each gang's pods; None if they do not queue."""
    return {
        plan.gang: group_of(current.job, plan.gang, plan.status.attempt, current.status.pod_group)
        for plan in plans
    }


# -- the job's group over time


def job_group(current: JobPass) -> PodGroupStatus | None:
    """Return the group by which the job is admitted; None if its spec has no podGroupPolicy."""
    job = current.job
    if job.spec.pod_group_policy is None:
        return None
    stored = current.status.pod_group or PodGroupStatus()
    if _has_begun(job, stored, current.observed):
        return stored
    replicas = min(job.spec.rollout.min_replicas, job.spec.replicas)
    return stored.model_copy(update={"replicas": replicas, "services": holds_services(job)})


def next_group(current: JobPass) -> PodGroupStatus | None:
    """Return the group for a job that gives its quota back.

    That is the present group if it has no pods yet, and its successor otherwise.
    """
    stored = current.status.pod_group
    if stored is None or not _has_begun(current.job, stored, current.observed):
        return stored
    update = {"number": stored.number + 1, "services": holds_services(current.job)}
    return stored.model_copy(update=update)


def _has_begun(job: RLJob, group: PodGroupStatus, observed: Observed) -> bool:
    name = names.group_name(job, group.number)
    return (names.POD_GROUP, name) in observed.objects or any(
        podstate.group(pod) == name for pod in observed.pods
    )


def with_whole_group(current: JobPass) -> JobPass:
    """Move the job to another group, with new attempts, if the present one can no longer be whole.

    A group is broken if a pod that has ended well is replaced, or if a gang of the group has pods
    outside of it.
    """
    stored = current.status.pod_group
    if stored is None or current.spec.pod_group_policy is None:
        return current
    name = names.group_name(current.job, stored.number)
    members = [pod for pod in current.pods if podstate.group(pod) == name]
    attempts = {
        (str(role.name), gang.replica): gang.attempt
        for role in current.status.roles
        for gang in role.gangs
    }
    present = [pod for pod in current.pods if podstate.attempt(pod) == attempts.get(_gang(pod))]
    replaced = [pod for pod in members if podstate.attempt(pod) < attempts.get(_gang(pod), 0)]
    if not (_is_spoiled(current.job, replaced) or (members and _is_split(stored, name, present))):
        return current
    new = next_group(current) or stored
    roles = [_moved(role, new, current.pods, current.now) for role in current.status.roles]
    return current.updated(pod_group=new, roles=roles)


def _is_spoiled(job: RLJob, replaced: Sequence[KubeObject]) -> bool:
    """Return True if a pod that has ended well is replaced, as after a failure of its gang.

    Kueue counts such a pod as done for ever and deletes each replacement as one pod too many.
    """
    policy = job.spec.pod_group_policy
    in_kueue = policy is not None and policy.kueue is not None
    return in_kueue and any(map(podstate.is_succeeded, replaced))


def _is_split(group: PodGroupStatus, name: str, present: Sequence[KubeObject]) -> bool:
    """Return True if a gang of the group has pods outside of it, such as those of older releases.

    A split group is never whole.
    """
    return any(
        podstate.group(pod) != name
        and in_job_group(Gang(podstate.role(pod), podstate.replica(pod), 1), group)  # type: ignore[arg-type]
        for pod in present
    )


def _gang(pod: KubeObject) -> tuple[str, int]:
    return podstate.role(pod), podstate.replica(pod)


def _moved(
    role: RoleStatus, group: PodGroupStatus, pods: Sequence[KubeObject], now: datetime
) -> RoleStatus:
    """Give each gang that belongs to the group another attempt."""
    members = by_gang(pods)
    gangs = [
        retire(gang, members[role.name, gang.replica], now)
        if in_job_group(Gang(role.name, gang.replica, 1), group)
        else gang
        for gang in role.gangs
    ]
    return role.model_copy(update={"gangs": gangs})


# -- further engines, which are admitted apart


def gangs_to_run(current: JobPass) -> list[Gang]:
    """Return the gangs that should run: those of the spec, maybe without further engines.

    Further engines are given up once a queue has held the job for a while. They would occupy what
    the job's own group waits for, and without a trainer they are of no use. Not at once, because a
    trainer that restarts is held for a moment too.
    """
    gangs, due = desired_gangs(current.job), give_back_time(current.status)
    group = current.status.pod_group
    if group is None or due is None or current.now < due:
        return gangs
    return [gang for gang in gangs if not _is_further_engine(gang, group)]


def give_back_time(status: RLJobStatus) -> datetime | None:
    """Return when a queued job gives its further engines back; None if it is not queued."""
    since = clock.parse_optional(status.queued_time)
    return since + timedelta(seconds=GIVE_BACK_SECONDS) if since else None


def job_group_first(
    group: PodGroupStatus | None, plans: Sequence[GangPlan], pods: Sequence[KubeObject]
) -> list[GangPlan]:
    """Create further engines only once every pod of the job's own group is scheduled.

    Otherwise they could take its places.
    """
    members = by_gang(pods)
    if group is None or all(
        _is_placed(plan, members[plan.gang.role, plan.gang.replica])
        for plan in plans
        if in_job_group(plan.gang, group)
    ):
        return [*plans]
    return [
        replace(plan, create=()) if _is_further_engine(plan.gang, group) else plan for plan in plans
    ]


def _is_further_engine(gang: Gang, group: PodGroupStatus) -> bool:
    return gang.role == "rollout" and not in_job_group(gang, group)


def _is_placed(plan: GangPlan, pods: Sequence[KubeObject]) -> bool:
    present = [pod for pod in pods if podstate.attempt(pod) == plan.status.attempt]
    return sum(map(podstate.is_scheduled, present)) >= plan.gang.size


# -- the end of a group


def finished_groups(
    pods: Sequence[KubeObject], present: Collection[str] = ()
) -> tuple[Deletion, ...]:
    """Tell Kueue about groups that have ended: no pod of theirs runs or will join.

    Otherwise Kueue waits for replacements and keeps quota and pods for them.

    Parameters
    ----------
    pods
        All pods of the job, including those that only Kueue's finalizer keeps.
    present
        Names of groups that go on.

    Returns
    -------
    Deletions of Workloads. A cluster carries them out in whichever way Kueue offers.

    """
    return tuple(
        Deletion(names.WORKLOAD, name)
        for name, members in sorted(pods_by_group(pods).items())
        if name not in present and _is_over(members) and _is_kept(members)
    )


def pods_by_group(pods: Sequence[KubeObject]) -> Mapping[str, list[KubeObject]]:
    """Return the pods that queue, by the name of their group."""
    groups: dict[str, list[KubeObject]] = defaultdict(list)
    for pod in pods:
        if podstate.group(pod):
            groups[podstate.group(pod)].append(pod)
    return groups


def _is_over(pods: Sequence[KubeObject]) -> bool:
    return all(podstate.is_finished(pod) or podstate.has_left(pod) for pod in pods)


def _is_kept(pods: Sequence[KubeObject]) -> bool:
    """Return True if Kueue keeps the pods and does not know yet that their group has ended."""
    kept = any(map(podstate.is_kept, pods))
    return kept and not (all_ended(pods) and any(podstate.ends_group(pod) for pod in pods))


def all_ended(pods: Sequence[KubeObject]) -> bool:
    """Return True if every pod has run to its end.

    A pod that was deleted behind its scheduling gate has not, and Kueue waits for it.
    """
    return all(map(podstate.is_finished, pods))
