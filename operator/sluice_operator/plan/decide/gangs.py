"""The gangs of a job, and what one pass does for one of them.

The one state that a gang needs is its attempt number. `retryTime` is set while an attempt is still
to be created (it starts no earlier) and cleared once all its pods have been seen: from then on a
missing pod is a lost pod, and the gang needs a new attempt. So pods that were created just before a
crash of the operator are found again, not created twice. Until then `seen` has those that were
there: one of them that is missing is lost, too, and never created again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from sluice.api import GangStatus, LastFailure, RLJob
from sluice.api.groups.lifecycle import FailurePolicy
from sluice_operator.plan.decide.gang_facts import gang_facts
from sluice_operator.plan.decide.restart import GiveUp, Restart, is_due, restart
from sluice_operator.plan.facts import clock, names, podstate
from sluice_operator.plan.facts.constants import (
    BROKEN_GRACE,
    ENGINE_GRACE,
    FORCE_DELETE_AFTER,
    GRACE,
    PEER_GRACE,
)
from sluice_operator.plan.facts.model import Deletion, Gang, GangFacts, KubeObject, Observed


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one pass for one gang.

    create: indices of the pods to create, all of `status.attempt`.

    due: when the gang must be looked at again, though nothing else happens.
    """

    gang: Gang
    status: GangStatus
    facts: GangFacts = field(default_factory=GangFacts)
    create: tuple[int, ...] = ()
    delete: tuple[Deletion, ...] = ()
    decision: Restart | GiveUp | None = None
    due: datetime | None = None


def desired_gangs(job: RLJob) -> list[Gang]:
    """All gangs that the spec asks for."""
    spec = job.spec
    services = [Gang("rendezvous", 0, 1), Gang("buffer", 0, 1)]
    rollouts = [
        Gang("rollout", replica, spec.rollout.nodes_per_replica) for replica in range(spec.replicas)
    ]
    return [*services, *rollouts, Gang("trainer", 0, spec.trainer.nodes)]


def by_gang(pods: Iterable[KubeObject]) -> Mapping[tuple[str, int], list[KubeObject]]:
    """The pods of each gang, by role and replica; none for others. Made once for a pass: a job may
    have a thousand engines.
    """
    members = defaultdict[tuple[str, int], list[KubeObject]](list)
    for pod in pods:
        members[podstate.role(pod), podstate.replica(pod)].append(pod)
    return members


def of_gang(gang: Gang, pods: Iterable[KubeObject]) -> list[KubeObject]:
    return by_gang(pods)[gang.role, gang.replica]


def present_attempt(
    gang: Gang, status: GangStatus | None, pods: Sequence[KubeObject], now: datetime
) -> GangStatus:
    """The gang's status; pods of a newer attempt than it knows (a lost status) are believed, so
    that it never falls.
    """
    newest = max((podstate.attempt(pod) for pod in pods), default=0)
    if status is None:
        return GangStatus(replica=gang.replica, attempt=max(newest, 1), retry_time=clock.text(now))
    if newest > status.attempt:
        return _another(status, newest, clock.text(now))
    return status


def _another(status: GangStatus, attempt: int, retry_time: str) -> GangStatus:
    """The status with another attempt, none of whose pods was seen yet."""
    update = {"attempt": attempt, "retry_time": retry_time, "ready_time": None, "seen": []}
    return status.model_copy(update=update)


def advance(
    gang: Gang,
    known: GangStatus | None,
    pods: Sequence[KubeObject],
    policy: FailurePolicy,
    now: datetime,
    hung: LastFailure | None = None,
) -> Step:
    """One pass over a gang that should run. pods: all pods of the gang, of any attempt.

    hung: the gang runs but makes no progress; that counts as its failure. Pods of older attempts go
    first; nothing else happens before they are gone, so two attempts never overlap.
    """
    status = present_attempt(gang, known, pods, now)
    older = [pod for pod in pods if podstate.attempt(pod) < status.attempt]
    if older:
        return Step(gang, status, delete=deletions(older, now))
    facts = gang_facts(gang, pods, now)
    if status.retry_time and not facts.missing:
        status = status.model_copy(update={"retry_time": None, "seen": []})
    elif status.retry_time and pods:
        there = {podstate.index(pod) for pod in pods}.union(status.seen)
        status = status.model_copy(update={"seen": sorted(there)})
    failed_before = gang.role == "rollout" and status.restarts > 0
    if failed_before and status.ready_time is None and facts.ready >= gang.size:
        status = status.model_copy(update={"ready_time": clock.text(now)})
    judged = _judged(facts, status, hung)
    cause_due = _cause_due(judged, pods)
    if cause_due is not None and now < cause_due:
        return Step(gang, status, facts, due=cause_due)
    decision = restart(gang, judged, status, policy, now)
    if isinstance(decision, Restart):
        at_most = _grace_of_broken(gang, pods) if decision.failure is not None else None
        delete = deletions(pods, now, at_most)
        return Step(
            gang, next_attempt(status, decision, now), facts, delete=delete, decision=decision
        )
    if isinstance(decision, GiveUp):
        return Step(gang, status, facts, decision=decision)
    due = status.retry_time is not None and is_due(
        clock.parse(status.retry_time), gang, policy, now
    )
    return Step(gang, status, facts, create=facts.missing if due else ())


def _judged(facts: GangFacts, status: GangStatus, hung: LastFailure | None) -> GangFacts:
    """The facts with what only time or history can tell: a lost pod is a disruption,
    a hang is a failure.
    """
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
    """Until when to wait for the reason of a pod that was lost, where only those have ended that
    miss it.
    """
    failure = facts.failure
    if failure is None or not podstate.lost_peer(failure) or facts.disruption or facts.config_error:
        return None
    if all(podstate.is_finished(pod) for pod in pods):
        return None
    return clock.parse(failure.time) + timedelta(seconds=PEER_GRACE)


def _grace_of_broken(gang: Gang, pods: Sequence[KubeObject]) -> int | None:
    """The most seconds for what is left of a gang that failed, where it has nothing to save."""
    if gang.role == "trainer":
        return BROKEN_GRACE
    return ENGINE_GRACE if any(podstate.has_ended(pod, "worker") for pod in pods) else None


def next_attempt(status: GangStatus, decision: Restart, now: datetime) -> GangStatus:
    restarted = status.model_copy(
        update={"restarts": decision.restarts, "last_restart_time": clock.text(now)}
    )
    return _another(restarted, status.attempt + 1, clock.later(now, decision.delay))


def retire(status: GangStatus, pods: Sequence[KubeObject], now: datetime) -> GangStatus:
    """The status of a gang that is to have no pods for a while (suspended, scaled down).

    Its next attempt number is written before its pods are deleted, so they are never mistaken for
    lost ones, and the number does not fall when the gang comes back.
    """
    there = any(podstate.attempt(pod) >= status.attempt for pod in pods)
    if status.retry_time and not status.seen and not there:
        return status
    newest = max((podstate.attempt(pod) for pod in pods), default=0)
    return _another(status, max(status.attempt, newest) + 1, clock.text(now))


def deletions(
    pods: Sequence[KubeObject], now: datetime, at_most: int | None = None
) -> tuple[Deletion, ...]:
    """Delete these pods: with their grace, `at_most` seconds, and by force where a dead node keeps
    one for ever. One that a Sandbox makes goes with that, which would make it anew.
    """
    planned = []
    for pod in pods:
        if podstate.sandbox(pod) and not podstate.is_terminating(pod):
            planned.append(Deletion(names.SANDBOX, podstate.sandbox(pod)))
        elif not podstate.is_terminating(pod):
            grace = _grace(pod) if at_most is None else min(_grace(pod), at_most)
            planned.append(Deletion("Pod", podstate.name(pod), grace))
        elif is_stuck(pod, now) and pod.get("kind") != names.SANDBOX:
            planned.append(Deletion("Pod", podstate.name(pod), 0))
    return tuple(planned)


def _grace(pod: KubeObject) -> int:
    """The grace that the pod was created with, which its role's template may say.
    0 would be by force.
    """
    seconds = pod.get("spec", {}).get("terminationGracePeriodSeconds")
    return max(seconds if seconds is not None else GRACE.get(podstate.role(pod), 30), 1)


def is_stuck(pod: KubeObject, now: datetime) -> bool:
    return now >= force_time(pod)


def exit_times(pods: Sequence[KubeObject]) -> list[datetime]:
    """When pods that are being deleted have had their grace, and when they count as stuck."""
    leaving = [pod for pod in pods if podstate.is_terminating(pod)]
    return [moment(pod) for pod in leaving for moment in (grace_end, force_time)]


def grace_end(pod: KubeObject) -> datetime:
    """DeletionTimestamp already contains the grace."""
    return clock.parse(pod["metadata"]["deletionTimestamp"])


def force_time(pod: KubeObject) -> datetime:
    return grace_end(pod) + timedelta(seconds=FORCE_DELETE_AFTER)


def living(observed: Observed) -> Observed:
    """Without pods that only a finalizer keeps: for all but Kueue they are gone."""
    return replace(observed, pods=tuple(pod for pod in observed.pods if not podstate.has_left(pod)))


def present_facts(
    gang: Gang, known: GangStatus | None, pods: Sequence[KubeObject], now: datetime
) -> GangFacts:
    attempt = known.attempt if known else 1
    return gang_facts(
        gang, [pod for pod in of_gang(gang, pods) if podstate.attempt(pod) == attempt], now
    )
