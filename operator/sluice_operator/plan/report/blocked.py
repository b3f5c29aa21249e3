"""Why a pod does not start, with what to do about it.

The reports of kubelets and schedulers are written for those who run clusters. Remedies are added
for the person who applied the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from sluice.api import LastFailure, RoleName
from sluice_operator.plan.facts import clock, names, podstate
from sluice_operator.plan.facts.constants import SANDBOX_PATIENCE
from sluice_operator.plan.facts.model import KubeletWarning, KubeObject
from sluice_operator.plan.report import remedies

_ORDINARY = (None, "ContainerCreating", "PodInitializing")
_IMAGE = "check the image's name, and imagePullSecrets in the role's template"
_REMEDIES = {
    "CreateContainerConfigError": "create the missing object in the job's namespace",
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
_IDLE_SANDBOX = "this Sandbox has no pod; check that agent-sandbox's controller is running"
# Warnings after which a pod's start counts as failed. A single one is often over a second later.
_LASTING_WARNINGS = 3


@dataclass(frozen=True, slots=True)
class Blocked:
    """A pod or container that cannot start.

    container: empty if the whole pod cannot start. message: why, and what to do.
    """

    role: RoleName
    pod: str
    container: str
    reason: str
    message: str

    def text(self) -> str:
        subject = f"{self.pod} ({self.container})" if self.container else self.pod
        return ": ".join(filter(None, (subject, self.reason, self.message)))

    def failure(self, now: datetime) -> LastFailure:
        return LastFailure(
            role=self.role,
            pod=self.pod,
            container=self.container,
            reason=self.reason,
            message=self.message,
            time=clock.text(now),
        )


def blocked(pods: Sequence[KubeObject], warned: Mapping[str, KubeletWarning]) -> Blocked | None:
    """Return the first pod that cannot start.

    Refused containers come first, then pods whose volumes or networks are missing, then pods that
    no node has room for.

    Parameters
    ----------
    pods
        The pods to look at.
    warned
        The latest warning of a kubelet, by pod name.

    """
    return failed_to_start(pods, warned, warnings=1) or next(
        (obstacle for pod in pods if (obstacle := _unscheduled(pod))), None
    )


def failed_to_start(
    pods: Sequence[KubeObject],
    warned: Mapping[str, KubeletWarning],
    warnings: int = _LASTING_WARNINGS,
) -> Blocked | None:
    """Return the first pod whose node has failed to start it.

    A kubelet's warning counts once it was repeated `warnings` times.
    """
    lasting = {pod: warning for pod, warning in warned.items() if warning.times >= warnings}
    refused = next((obstacle for pod in pods if (obstacle := refused_container(pod))), None)
    return refused or next((obstacle for pod in pods if (obstacle := _warned(pod, lasting))), None)


def blocked_episodes(
    pods: Sequence[KubeObject], warned: Mapping[str, KubeletWarning], now: datetime
) -> Blocked | None:
    """Return the first pod of an episode or a verifier that cannot start.

    A pod without a node, or a Sandbox without a pod, counts only if no pod of its role runs.
    Otherwise the warm pool is only smaller than requested, and the job goes on.
    """
    pools = [[pod for pod in pods if podstate.role(pod) == role] for role in names.EPISODES]
    return next(
        (obstacle for pool in pools if (obstacle := _blocked_pool(pool, warned, now))), None
    )


def _blocked_pool(
    pods: Sequence[KubeObject], warned: Mapping[str, KubeletWarning], now: datetime
) -> Blocked | None:
    if any(map(podstate.is_running, pods)):
        return failed_to_start(pods, warned)
    without_pod = (obstacle for pod in pods if (obstacle := _sandbox_without_pod(pod, now)))
    return blocked(pods, warned) or next(without_pod, None)


def _sandbox_without_pod(stored: KubeObject, now: datetime) -> Blocked | None:
    """Return a Sandbox whose pod was refused, or that has had no pod for long."""
    if stored["kind"] != names.SANDBOX or podstate.is_terminating(stored):
        return None
    reason, message = podstate.readiness(stored)
    if reason != _REFUSED_SANDBOX and podstate.age(stored, now) < SANDBOX_PATIENCE:
        return None
    text = remedies.with_remedy(message, remedies.REFUSALS) if message else _IDLE_SANDBOX
    return _blocked(stored, reason or "NoPod", text)


def _warned(pod: KubeObject, warned: Mapping[str, KubeletWarning]) -> Blocked | None:
    """Return a pod that has a node and is not started there."""
    warning = warned.get(podstate.name(pod))
    if warning is None or not podstate.is_starting(pod):
        return None
    text = remedies.with_remedy(warning.message, remedies.KUBELET_WARNINGS)
    return _blocked(pod, warning.reason, text)


def refused_container(pod: KubeObject) -> Blocked | None:
    """Return a container of the pod that its kubelet cannot start."""
    for status in podstate.container_statuses(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason not in _ORDINARY:
            text = remedies.joined(waiting.get("message", ""), _REMEDIES.get(reason, ""))
            return _blocked(pod, reason, text, status["name"])
    return None


def _unscheduled(pod: KubeObject) -> Blocked | None:
    message = podstate.unscheduled_because(pod)
    if not message or podstate.is_gated(pod):
        return None
    return _blocked(pod, "Unschedulable", remedies.with_remedy(message, remedies.PLACEMENT))


def _blocked(pod: KubeObject, reason: str, message: str, container: str = "") -> Blocked:
    role = cast(RoleName, podstate.role(pod))
    return Blocked(role, podstate.name(pod), container, reason, message)
