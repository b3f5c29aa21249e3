"""Why a pod does not start, in words that say what to do.

What a kubelet or a scheduler reports is known to those who run clusters; who applied the job gets a
cure with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sluice.api import LastFailure, RoleName
from sluice_operator.plan.facts import clock, names, podstate
from sluice_operator.plan.facts.constants import SANDBOX_PATIENCE
from sluice_operator.plan.facts.model import KubeObject, Warned
from sluice_operator.plan.report import remedies

_ORDINARY = (None, "ContainerCreating", "PodInitializing")
_IMAGE = "check the image's name, and imagePullSecrets in the role's template"
_CURES = {
    "CreateContainerConfigError": "create what it names in the job's namespace",
    "CreateContainerError": "the node's container runtime refused it; check command and mounts in "
    "the role's template",
    "ErrImageNeverPull": _IMAGE,
    "ErrImagePull": _IMAGE,
    "ImageInspectError": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "InvalidImageName": _IMAGE,
    "RunContainerError": "the node's container runtime refused it; check command and mounts in the "
    "role's template",
}
_REFUSED_SANDBOX = "ReconcilerError"
_IDLE_SANDBOX = (
    "nobody has made the pod of this Sandbox; check that agent-sandbox's controller runs"
)
TIMES = 3
"""Warnings of a kubelet that make a failure: one of a pod's start is often over a second later."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """role, pod, container: who cannot start; container empty: the whole pod. message: why, and
    what to do.
    """

    role: RoleName
    pod: str
    container: str
    reason: str
    message: str

    @property
    def place(self) -> tuple[str, str]:
        return self.pod, self.container

    def text(self) -> str:
        where = f"{self.pod} ({self.container})" if self.container else self.pod
        return (
            f"{where}: {self.reason}: {self.message}" if self.message else f"{where}: {self.reason}"
        )

    def failure(self, now: datetime) -> LastFailure:
        return LastFailure(
            role=self.role,
            pod=self.pod,
            container=self.container,
            reason=self.reason,
            message=self.message,
            time=clock.text(now),
        )


def blocked(pods: Sequence[KubeObject], warned: Mapping[str, Warned]) -> Blocked | None:
    """The first pod that cannot start.

    Containers that were refused come before pods whose volumes or networks are missing, and these
    before pods that nobody has a place for. warned: pod -> what its kubelet warns of.
    """
    refused = next((obstacle for pod in pods if (obstacle := refused_container(pod))), None)
    refused = refused or next(
        (obstacle for pod in pods if (obstacle := _warned(pod, warned))), None
    )
    return refused or next((obstacle for pod in pods if (obstacle := _unscheduled(pod))), None)


def failed_to_start(pods: Sequence[KubeObject], warned: Mapping[str, Warned]) -> Blocked | None:
    """The first pod whose start has failed: its node does not want it as it is."""
    lasting = {pod: warning for pod, warning in warned.items() if warning.times >= TIMES}
    refused = next((obstacle for pod in pods if (obstacle := refused_container(pod))), None)
    return refused or next((obstacle for pod in pods if (obstacle := _warned(pod, lasting))), None)


def blocked_episodes(
    pods: Sequence[KubeObject], warned: Mapping[str, Warned], now: datetime
) -> Blocked | None:
    """The first pod of an episode, or of a verifier, that cannot start. One without a place, or a
    Sandbox without a pod, is told where none of its role runs: else the pool is smaller than was
    asked for, and the job goes on.
    """
    pools = [[pod for pod in pods if podstate.role(pod) == role] for role in names.EPISODES]
    return next((stuck for pool in pools if (stuck := _blocked_pool(pool, warned, now))), None)


def _blocked_pool(
    pods: Sequence[KubeObject], warned: Mapping[str, Warned], now: datetime
) -> Blocked | None:
    if any(map(podstate.is_running, pods)):
        return failed_to_start(pods, warned)
    unmade = (obstacle for pod in pods if (obstacle := _unmade(pod, now)))
    return blocked(pods, warned) or next(unmade, None)


def _unmade(stored: KubeObject, now: datetime) -> Blocked | None:
    """A Sandbox whose pod is refused, in the words of its controller; or that has had none for
    long.
    """
    if stored["kind"] != names.SANDBOX or podstate.is_terminating(stored):
        return None
    reason, message = podstate.readiness(stored)
    if reason != _REFUSED_SANDBOX and podstate.age(stored, now) < SANDBOX_PATIENCE:
        return None
    text = remedies.with_cure(message, remedies.OF_REFUSALS) if message else _IDLE_SANDBOX
    name = podstate.name(stored)
    return Blocked(podstate.role(stored), name, "", reason or "NoPod", text)  # type: ignore[arg-type]


def _warned(pod: KubeObject, warned: Mapping[str, Warned]) -> Blocked | None:
    """A pod that has its node, and is not started there."""
    warning = warned.get(podstate.name(pod))
    if warning is None or not podstate.is_starting(pod):
        return None
    text = remedies.with_cure(warning.message, remedies.OF_WARNINGS)
    return Blocked(podstate.role(pod), podstate.name(pod), "", warning.reason, text)  # type: ignore[arg-type]


def refused_container(pod: KubeObject) -> Blocked | None:
    """A container that its kubelet cannot start."""
    for status in podstate.container_statuses(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason not in _ORDINARY:
            message = remedies.joined(waiting.get("message", ""), _CURES.get(reason, ""))
            return Blocked(podstate.role(pod), podstate.name(pod), status["name"], reason, message)  # type: ignore[arg-type]
    return None


def _unscheduled(pod: KubeObject) -> Blocked | None:
    message = podstate.unscheduled_because(pod)
    if not message or podstate.is_gated(pod):
        return None
    text = remedies.with_cure(message, remedies.OF_PLACEMENT)
    return Blocked(podstate.role(pod), podstate.name(pod), "", "Unschedulable", text)  # type: ignore[arg-type]
