"""Episode pods: which ones there should be.

Each engine has so many places for episodes, and for verifiers so many where the job has one; a
place has one pod after another, each of which plays, or judges, one episode.
Pods that wait for an episode are the warm pool, so a place is filled again as soon as its pod has
ended, and none is filled before the worker that they join has its address. A Sandbox that has no
pod yet counts as the pod that it makes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sluice.api import RLJob
from sluice_operator.plan.decide.gangs import deletions
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import Deletion, KubeObject

Key = tuple[str, int, int, int]
"""Role, replica, attempt and index of a place."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place at a worker: of replica and attempt, at an IP address. role: one of EPISODES."""

    role: str
    replica: int
    attempt: int
    index: int
    worker: str

    @property
    def key(self) -> Key:
        return self.role, self.replica, self.attempt, self.index


@dataclass(frozen=True, slots=True)
class Turn:
    """A pod to create: the place's next."""

    place: Place
    number: int


def split(pods: Sequence[KubeObject]) -> tuple[tuple[KubeObject, ...], tuple[KubeObject, ...]]:
    """(the pods of the job's gangs, the pods of its episodes)."""
    episodes = tuple(pod for pod in pods if podstate.role(pod) in names.EPISODES)
    return tuple(pod for pod in pods if podstate.role(pod) not in names.EPISODES), episodes


def places(job: RLJob, pods: Sequence[KubeObject]) -> list[Place]:
    """All places. pods: of the job's gangs."""
    return [
        Place(role, podstate.replica(pod), podstate.attempt(pod), index, address)
        for pod in pods
        if (address := _worker(pod))
        for role, count in _of_engine(job)
        for index in range(count)
    ]


def _of_engine(job: RLJob) -> list[tuple[str, int]]:
    """(role, how many places) of each engine."""
    environment = job.spec.rollout.environment
    if environment is None or environment.image is None:
        return []
    verifier = environment.verifier
    verifiers = [(names.VERIFIER, verifier.pods)] if verifier else []
    return [(names.EPISODE, environment.pods), *verifiers]


def _worker(pod: KubeObject) -> str:
    """The address of the worker in this pod; empty: there is none that works."""
    leads = podstate.role(pod) == "rollout" and podstate.index(pod) == 0
    if not leads or podstate.is_terminating(pod) or not podstate.is_running(pod):
        return ""
    return podstate.address(pod)


def turns(wanted: Sequence[Place], episodes: Sequence[KubeObject]) -> list[Turn]:
    """The pods to create: one for each place that has none that goes on."""
    known = _by_place(episodes)
    return [
        Turn(place, 1 + max(map(podstate.number, pods), default=0))
        for place in wanted
        if not any(map(_goes_on, pods := known[place.key]))
    ]


def over(
    wanted: Sequence[Place],
    episodes: Sequence[KubeObject],
    now: datetime,
    sandboxes: Sequence[KubeObject] = (),
) -> tuple[Deletion, ...]:
    """The deletions of pods that have ended, and of those whose worker is gone.

    sandboxes: the job's; one of them would make its pod anew, whoever has deleted that.
    """
    kept = {place.key for place in wanted}
    gone = [pod for pod in episodes if _key(pod) not in kept or not _goes_on(pod)]
    makers = {podstate.name(each) for each in sandboxes if not podstate.is_terminating(each)}
    ending = sorted(makers & {podstate.sandbox(pod) for pod in gone})
    others = [pod for pod in gone if podstate.sandbox(pod) not in ending]
    return tuple(Deletion(names.SANDBOX, name) for name in ending) + deletions(others, now)


def _by_place(episodes: Sequence[KubeObject]) -> defaultdict[Key, list[KubeObject]]:
    pods = defaultdict[Key, list[KubeObject]](list)
    for pod in episodes:
        pods[_key(pod)].append(pod)
    return pods


def _key(pod: KubeObject) -> Key:
    place = podstate.replica(pod), podstate.attempt(pod), podstate.index(pod)
    return podstate.role(pod), *place


def _goes_on(pod: KubeObject) -> bool:
    """None of its containers has ended: neither the program nor the sidecar goes on alone."""
    ended = podstate.is_finished(pod) or podstate.has_ended_container(pod)
    return not (ended or podstate.is_terminating(pod))
