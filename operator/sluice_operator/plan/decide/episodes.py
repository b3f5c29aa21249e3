"""Slots for the pods of episodes and verifiers, and the pods that should fill them.

Each engine has a number of slots for episodes, and for verifiers if the job has one. A slot has one
pod after another, and each pod plays or judges one episode. Pods that wait for an episode are the
warm pool, so a slot is filled again as soon as its pod has ended. No slot is filled before the
worker that its pod joins has an address. A Sandbox that has no pod yet counts as the pod that it
makes.

If rows name the images of pods, no pod waits for an episode of any image. A worker tells which
images its episodes wait for, and which pods have joined it. Pods that have not joined yet are
coming, so only the difference is created.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sluice.api import RLJob
from sluice.container_images import is_from_row
from sluice_operator.plan.decide.deletion import deletions
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import NO_DEMANDS, Deletion, KubeObject, WorkerDemands

SlotKey = tuple[str, int, int, int]  # role, replica, attempt and index


@dataclass(frozen=True, slots=True)
class EpisodeSlot:
    """A slot for pods that join one worker.

    role: `episode` or `verifier`. replica, attempt: those of the worker's pod. worker: its IP
    address.
    """

    role: str
    replica: int
    attempt: int
    index: int
    worker: str

    @property
    def key(self) -> SlotKey:
        return self.role, self.replica, self.attempt, self.index


@dataclass(frozen=True, slots=True)
class EpisodePod:
    """The next pod of a slot.

    number: how many pods the slot has had with it. image: that of the row; empty if the job names
    the image.
    """

    slot: EpisodeSlot
    number: int
    image: str = ""


def split_episodes(
    pods: Sequence[KubeObject],
) -> tuple[tuple[KubeObject, ...], tuple[KubeObject, ...]]:
    """Split a job's pods into those of its gangs and those of episodes and verifiers."""
    episodes = tuple(pod for pod in pods if podstate.role(pod) in names.EPISODES)
    return tuple(pod for pod in pods if podstate.role(pod) not in names.EPISODES), episodes


def episode_slots(job: RLJob, pods: Sequence[KubeObject]) -> list[EpisodeSlot]:
    """Return all slots of the workers that run now, given the pods of the job's gangs."""
    return [
        EpisodeSlot(role, podstate.replica(pod), podstate.attempt(pod), index, address)
        for pod in pods
        if (address := _worker_address(pod))
        for role, count in _slots_per_engine(job)
        for index in range(count)
    ]


def _slots_per_engine(job: RLJob) -> list[tuple[str, int]]:
    """Return (role, number of slots)."""
    environment = job.spec.rollout.environment
    if environment is None or environment.image is None:
        return []
    verifier = environment.verifier
    verifiers = [(names.VERIFIER, verifier.pods)] if verifier else []
    return [(names.EPISODE, environment.pods), *verifiers]


def _worker_address(pod: KubeObject) -> str:
    """Return the address of the worker in this pod; empty if the pod has no running worker."""
    leads = podstate.role(pod) == "rollout" and podstate.index(pod) == 0
    if not leads or podstate.is_terminating(pod) or not podstate.is_running(pod):
        return ""
    return podstate.address(pod)


def missing_episode_pods(
    job: RLJob,
    slots: Sequence[EpisodeSlot],
    episodes: Sequence[KubeObject],
    demands: WorkerDemands = NO_DEMANDS,
) -> list[EpisodePod]:
    """Return the pods to create: one for each slot without a pod that goes on.

    If rows name the images of pods, only as many as their worker waits for.

    Parameters
    ----------
    job
        The job.
    slots
        All slots of the job.
    episodes
        Its pods of episodes and verifiers.
    demands
        The pods that workers wait for.

    """
    pods_by_slot = _by_slot(episodes)
    images = _images_needed(episodes, demands)
    missing = []
    for slot in slots:
        pods = pods_by_slot[slot.key]
        if any(map(_goes_on, pods)):
            continue
        image = ""
        if has_row_image(job, slot.role):
            needed = images[slot.role, slot.replica, slot.attempt]
            if not needed:
                continue
            image = needed.pop(0)
        number = 1 + max(map(podstate.number, pods), default=0)
        missing.append(EpisodePod(slot, number, image))
    return missing


def has_row_image(job: RLJob, role: str) -> bool:
    """Return True if rows name the image of the pods of this role."""
    environment = job.spec.rollout.environment
    if environment is None:
        return False
    image = environment.verifier_image if role == names.VERIFIER else environment.image
    return is_from_row(image)


def _images_needed(
    episodes: Sequence[KubeObject], demands: WorkerDemands
) -> defaultdict[tuple[str, int, int], list[str]]:
    """Return the image of each pod that no pod is coming for, by role, replica and attempt."""
    coming = Counter(
        (podstate.role(pod), podstate.row_image(pod), podstate.replica(pod), podstate.attempt(pod))
        for pod in episodes
        if _goes_on(pod) and podstate.name(pod) not in _joined(pod, demands)
    )
    needed = defaultdict[tuple[str, int, int], list[str]](list)
    for (replica, attempt), demand in demands.items():
        for role, image, count in demand.waiting:
            missing = count - coming[role, image, replica, attempt]
            needed[role, replica, attempt] += [image] * missing
    return needed


def _joined(pod: KubeObject, demands: WorkerDemands) -> frozenset[str]:
    demand = demands.get((podstate.replica(pod), podstate.attempt(pod)))
    return demand.joined if demand else frozenset()


def _is_unwanted(pod: KubeObject, demands: WorkerDemands) -> bool:
    """Return True if a pod of a row's image has not started, and no episode waits for it now."""
    image, worker = podstate.row_image(pod), (podstate.replica(pod), podstate.attempt(pod))
    if not image or worker not in demands or podstate.name(pod) in demands[worker].joined:
        return False
    wanted = {(role, image) for role, image, _ in demands[worker].waiting}
    return not podstate.is_running(pod) and (podstate.role(pod), image) not in wanted


def surplus_episode_pods(
    slots: Sequence[EpisodeSlot],
    episodes: Sequence[KubeObject],
    now: datetime,
    sandboxes: Sequence[KubeObject] = (),
    demands: WorkerDemands = NO_DEMANDS,
) -> tuple[Deletion, ...]:
    """Delete episode pods that have ended, and those whose worker is gone.

    Parameters
    ----------
    slots
        All slots of the job.
    episodes
        Its pods of episodes and verifiers.
    now
        The time of this pass.
    sandboxes
        The job's Sandboxes. A pod that one of them made is deleted with it, because the Sandbox
        would create the pod again.
    demands
        The pods that workers wait for.

    """
    kept = {slot.key for slot in slots}
    gone = [
        pod
        for pod in episodes
        if _key(pod) not in kept or not _goes_on(pod) or _is_unwanted(pod, demands)
    ]
    makers = {
        podstate.name(sandbox) for sandbox in sandboxes if not podstate.is_terminating(sandbox)
    }
    ending = sorted(makers & {podstate.sandbox(pod) for pod in gone})
    others = [pod for pod in gone if podstate.sandbox(pod) not in ending]
    return tuple(Deletion(names.SANDBOX, name) for name in ending) + deletions(others, now)


def _by_slot(episodes: Sequence[KubeObject]) -> defaultdict[SlotKey, list[KubeObject]]:
    pods = defaultdict[SlotKey, list[KubeObject]](list)
    for pod in episodes:
        pods[_key(pod)].append(pod)
    return pods


def _key(pod: KubeObject) -> SlotKey:
    return podstate.role(pod), podstate.replica(pod), podstate.attempt(pod), podstate.index(pod)


def _goes_on(pod: KubeObject) -> bool:
    # Neither the program nor the sidecar goes on without the other.
    ended = podstate.is_finished(pod) or podstate.has_ended_container(pod)
    return not (ended or podstate.is_terminating(pod))
