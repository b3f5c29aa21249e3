"""The gangs of a job, and what one pass does for each of them.

The state of a gang is its attempt number. `retryTime` is set while the pods of an attempt are still
to be created, and is the earliest time for that. It is cleared once all pods of the attempt have
been seen: from then on a missing pod is a lost pod, and the gang needs a new attempt. So pods that
were created just before a crash of the operator are found again and not created twice. Until then,
`seen` lists the pods that existed; one of them that is missing is lost as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sluice.api import GangStatus, LastFailure, RLJob
from sluice.api.groups.lifecycle import FailurePolicy
from sluice_operator.plan.decide.deletion import deletions
from sluice_operator.plan.decide.restart import GiveUp, Restart, is_due, restart
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.constants import BROKEN_GRACE, ENGINE_GRACE, PEER_GRACE
from sluice_operator.plan.facts.model import Deletion, Gang, GangFacts, KubeObject


@dataclass(frozen=True, slots=True)
class GangPlan:
    """The work of one pass for one gang.

    create: indices of the pods to create, all of `status.attempt`. due: time at which the gang has
    to be looked at again without another event.
    """

    gang: Gang
    status: GangStatus
    facts: GangFacts = field(default_factory=GangFacts)
    create: tuple[int, ...] = ()
    delete: tuple[Deletion, ...] = ()
    decision: Restart | GiveUp | None = None
    due: datetime | None = None


def desired_gangs(job: RLJob) -> list[Gang]:
    """Return all gangs that the spec asks for."""
    spec = job.spec
    services = [Gang("rendezvous", 0, 1), Gang("buffer", 0, 1)]
    rollouts = [
        Gang("rollout", replica, spec.rollout.nodes_per_replica) for replica in range(spec.replicas)
    ]
    return [*services, *rollouts, Gang("trainer", 0, spec.trainer.nodes)]


def by_gang(pods: Iterable[KubeObject]) -> Mapping[tuple[str, int], list[KubeObject]]:
    """Return the pods of each gang, by (role, replica); a missing key is an empty list."""
    # A job may have a thousand engines, so a pass groups its pods once.
    members = defaultdict[tuple[str, int], list[KubeObject]](list)
    for pod in pods:
        members[podstate.role(pod), podstate.replica(pod)].append(pod)
    return members


def of_gang(gang: Gang, pods: Iterable[KubeObject]) -> list[KubeObject]:
    return by_gang(pods)[gang.role, gang.replica]


def gang_facts(gang: Gang, pods: Sequence[KubeObject], now: datetime) -> GangFacts:
    """Read the facts of one attempt from its pods.

    Parameters
    ----------
    gang
        The gang.
    pods
        All pods of the attempt, and no others.
    now
        The time of this pass, for failures that carry no time.

    """
    present = {podstate.index(pod) for pod in pods}
    failures = [failure for pod in pods for failure in podstate.failures(pod, now)]
    undisturbed = [pod for pod in pods if not podstate.disruption(pod)]
    config_errors = [error for pod in undisturbed if (error := podstate.config_error(pod, now))]
    starts = [start for pod in pods if (start := podstate.started(pod))]
    return GangFacts(
        seen=len(pods),
        ready=sum(podstate.is_ready(pod) for pod in pods),
        running=sum(podstate.is_running(pod) for pod in pods),
        succeeded=sum(podstate.succeeded(pod) for pod in pods),
        missing=tuple(index for index in range(gang.size) if index not in present),
        failure=min(failures, key=podstate.root_cause_order) if failures else None,
        config_error=config_errors[0] if config_errors else None,
        disruption=next((text for pod in pods if (text := podstate.disruption(pod))), ""),
        started=min(starts) if starts else None,
    )


def present_facts(
    gang: Gang, status: GangStatus | None, pods: Sequence[KubeObject], now: datetime
) -> GangFacts:
    """Read the facts of the gang's present attempt from the pods of the whole job."""
    attempt = status.attempt if status else 1
    members = [pod for pod in of_gang(gang, pods) if podstate.attempt(pod) == attempt]
    return gang_facts(gang, members, now)


def has_succeeded(gang: Gang, facts: GangFacts) -> bool:
    """Return True if the job has succeeded: all trainer pods have ended with exit code 0.

    The other roles do not count: without a trainer, samples are of no use.
    """
    return gang.role == "trainer" and facts.succeeded == gang.size and facts.failure is None


def advance(
    gang: Gang,
    stored: GangStatus | None,
    pods: Sequence[KubeObject],
    policy: FailurePolicy,
    now: datetime,
    hung: LastFailure | None = None,
) -> GangPlan:
    """Decide what to do in this pass for a gang that should run.

    Pods of older attempts are deleted first. The gang waits until they are gone, so two attempts
    never overlap.

    Parameters
    ----------
    gang
        The gang.
    stored
        Its status after the last pass; None before the first one.
    pods
        All pods of the gang, of any attempt.
    policy
        The job's failure policy.
    now
        The time of this pass.
    hung
        Set if the gang runs without progress; that counts as its failure.

    """
    status = present_attempt(gang, stored, pods, now)
    older = [pod for pod in pods if podstate.attempt(pod) < status.attempt]
    if older:
        return GangPlan(gang, status, delete=deletions(older, now))
    facts = gang_facts(gang, pods, now)
    status = _with_seen_pods(gang, status, facts, pods, now)
    judged = _with_lost_pods_and_hang(facts, status, hung)

    cause_due = _cause_due(judged, pods)
    if cause_due is not None and now < cause_due:
        return GangPlan(gang, status, facts, due=cause_due)

    decision = restart(gang, judged, status, policy, now)
    if isinstance(decision, Restart):
        at_most = _grace_after_failure(gang, pods) if decision.failure is not None else None
        delete = deletions(pods, now, at_most)
        following = next_attempt(status, decision, now)
        return GangPlan(gang, following, facts, delete=delete, decision=decision)
    if isinstance(decision, GiveUp):
        return GangPlan(gang, status, facts, decision=decision)

    retry_time = clock.parse_optional(status.retry_time)
    due = retry_time is not None and is_due(retry_time, gang, policy, now)
    return GangPlan(gang, status, facts, create=facts.missing if due else ())


def present_attempt(
    gang: Gang, status: GangStatus | None, pods: Sequence[KubeObject], now: datetime
) -> GangStatus:
    """Return the gang's status, at the attempt number of its newest pod or higher.

    If a status was lost, the pods tell the attempt, so that the number never falls.
    """
    newest = max((podstate.attempt(pod) for pod in pods), default=0)
    if status is None:
        return GangStatus(replica=gang.replica, attempt=max(newest, 1), retry_time=clock.text(now))
    if newest > status.attempt:
        return _at_attempt(status, newest, clock.text(now))
    return status


def _at_attempt(status: GangStatus, attempt: int, retry_time: str) -> GangStatus:
    """Return the status at another attempt, whose pods have not been seen yet."""
    update = {"attempt": attempt, "retry_time": retry_time, "ready_time": None, "seen": []}
    return status.model_copy(update=update)


def _with_seen_pods(
    gang: Gang, status: GangStatus, facts: GangFacts, pods: Sequence[KubeObject], now: datetime
) -> GangStatus:
    """Note in the status which pods exist, and when a restarted engine became ready."""
    if status.retry_time and not facts.missing:
        status = status.model_copy(update={"retry_time": None, "seen": []})
    elif status.retry_time and pods:
        seen = {podstate.index(pod) for pod in pods}.union(status.seen)
        status = status.model_copy(update={"seen": sorted(seen)})
    failed_before = gang.role == "rollout" and status.restarts > 0
    if failed_before and status.ready_time is None and facts.ready >= gang.size:
        status = status.model_copy(update={"ready_time": clock.text(now)})
    return status


def _with_lost_pods_and_hang(
    facts: GangFacts, status: GangStatus, hung: LastFailure | None
) -> GangFacts:
    """Add what the pods do not show: a lost pod is a disruption, a hang is a failure."""
    lost = (
        bool(facts.missing)
        if status.retry_time is None
        else not set(facts.missing).isdisjoint(status.seen)
    )
    return GangFacts(
        failure=facts.failure or hung,
        config_error=facts.config_error,
        disruption=facts.disruption or ("a pod vanished" if lost else ""),
        started=facts.started,
    )


def _cause_due(facts: GangFacts, pods: Sequence[KubeObject]) -> datetime | None:
    """Return until when to wait for the cause, if only pods that lost another pod have ended."""
    failure = facts.failure
    if failure is None or not podstate.lost_peer(failure) or facts.disruption or facts.config_error:
        return None
    if all(podstate.is_finished(pod) for pod in pods):
        return None
    return clock.parse(failure.time) + timedelta(seconds=PEER_GRACE)


def _grace_after_failure(gang: Gang, pods: Sequence[KubeObject]) -> int | None:
    """Return the upper bound of the grace for the remaining pods of a gang that failed."""
    if gang.role == "trainer":
        return BROKEN_GRACE
    return ENGINE_GRACE if any(podstate.has_ended(pod, "worker") for pod in pods) else None


def next_attempt(status: GangStatus, decision: Restart, now: datetime) -> GangStatus:
    restarted = status.model_copy(
        update={"restarts": decision.restarts, "last_restart_time": clock.text(now)}
    )
    return _at_attempt(restarted, status.attempt + 1, clock.later(now, decision.delay))


def retire(status: GangStatus, pods: Sequence[KubeObject], now: datetime) -> GangStatus:
    """Return the status of a gang that has no pods for a while (suspended or scaled down).

    The next attempt number is written before the pods are deleted. So they never count as lost, and
    the number does not fall when the gang returns.
    """
    present = any(podstate.attempt(pod) >= status.attempt for pod in pods)
    if status.retry_time and not status.seen and not present:
        return status
    newest = max((podstate.attempt(pod) for pod in pods), default=0)
    return _at_attempt(status, max(status.attempt, newest) + 1, clock.text(now))


def lacks_pods(job: RLJob, pods: Sequence[KubeObject]) -> bool:
    """Return True if a gang, all of whose pods were seen, has fewer pods now.

    A job that is suspended or has ended lacks no pods.

    Parameters
    ----------
    job
        The job, with its stored status.
    pods
        All pods of the job.

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
        stored = status.gang(gang.role, gang.replica)
        if stored is None or stored.retry_time is not None:
            continue
        present = members[gang.role, gang.replica]
        if sum(podstate.attempt(pod) == stored.attempt for pod in present) < gang.size:
            return True
    return False
