"""Reads the status of a pod, from Kubernetes as well as from a laptop.

Failures are read from container statuses and not from the pod's phase: with restartPolicy Never, a
pod with two containers is `Failed` only once both have ended, and an engine whose worker has died
would idle for ever.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from sluice.api import LastFailure, RoleName
from sluice.api.groups.resources import less_memory, memory_field
from sluice.runtime import error_summary as causes
from sluice.telemetry.terminal import escaped
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.constants import EXIT_CONFIG_ERROR, EXIT_PEER_LOST, UNEXPECTED_END
from sluice_operator.plan.facts.model import KubeObject
from sluice_operator.plan.facts.names import (
    ENDS_GROUP,
    KEPT_BY_KUEUE,
    LABEL_ATTEMPT,
    LABEL_GROUP,
    LABEL_INDEX,
    LABEL_NUMBER,
    LABEL_QUEUE,
    LABEL_REPLICA,
    LABEL_ROLE,
    ROW_IMAGE,
    SANDBOX,
    SANDBOX_GROUP,
)

_DISRUPTIONS = {
    "Evicted",
    "NodeAffinity",
    "NodeLost",
    "NodeShutdown",
    "Preempting",
    "Shutdown",
    "Terminated",
    "UnexpectedAdmissionError",
}
# Conditions of a pod that is about to be disrupted: Kubernetes' own, and the one that Kueue sets
# before it deletes the pods of an evicted group.
_DISRUPTED = ("DisruptionTarget", "TerminationTarget")
# Prefix of the reason if a kubelet lacks a resource when the pod arrives (OutOfcpu,
# OutOfnvidia.com/gpu).
_OUT_OF = "OutOf"
# Containers that end only with the job. For all others, exit code 0 is a good end.
_MUST_RUN = {"rendezvous", "buffer", "engine", "worker", "openenv"}
# Containers with the exit codes of docs/contracts.md. The job's server or sidecar may use them for
# something else: a Go panic exits with 2, and so does a Python that does not find its script.
_WITH_CONTRACT = {
    "rendezvous",
    "buffer",
    "fetch",
    "rows",
    "plugin",
    "engine",
    "worker",
    "trainer",
}
_OUT_OF_MEMORY = "OOMKilled"
# A kubelet's reason if the kernel killed a process because the machine, and not the container, had
# no memory left.
OUT_OF_MACHINE = "SystemOOM"
_MESSAGE_LIMIT = 8192
# Higher exit codes are 128 + the number of the signal that killed the process.
_SIGNALLED = 128


def name(pod: KubeObject) -> str:
    return str(pod["metadata"]["name"])


def labels(pod: KubeObject) -> dict[str, str]:
    pairs: dict[str, str] = pod["metadata"].get("labels") or {}
    return pairs


def role(pod: KubeObject) -> str:
    return labels(pod).get(LABEL_ROLE, "")


def replica(pod: KubeObject) -> int:
    return int(labels(pod).get(LABEL_REPLICA, 0))


def attempt(pod: KubeObject) -> int:
    return int(labels(pod).get(LABEL_ATTEMPT, 0))


def index(pod: KubeObject) -> int:
    return int(labels(pod).get(LABEL_INDEX, 0))


def number(pod: KubeObject) -> int:
    """Return how many pods the slot of an episode pod has had, including this one."""
    return int(labels(pod).get(LABEL_NUMBER, 0))


def row_image(pod: KubeObject) -> str:
    """Return the image of an episode pod as its row names it; empty if the job names it."""
    return str((pod["metadata"].get("annotations") or {}).get(ROW_IMAGE, ""))


def address(pod: KubeObject) -> str:
    """Return the pod's IP address; empty if it has none yet."""
    return str(_status(pod).get("podIP") or "")


def group(pod: KubeObject) -> str:
    """Return the group with which a queue admits the pod; empty if it does not queue."""
    return labels(pod).get(LABEL_GROUP, "")


def sandbox(pod: KubeObject) -> str:
    """Return the name of the Sandbox that owns the pod; empty if none does.

    A Sandbox without a pod is treated as its pod, and names itself.
    """
    if pod.get("kind") == SANDBOX:
        return name(pod)
    owners = pod["metadata"].get("ownerReferences") or []
    return next((str(owner["name"]) for owner in owners if _is_sandbox(owner)), "")


def _is_sandbox(owner: dict[str, Any]) -> bool:
    group = str(owner["apiVersion"]).partition("/")[0]
    return bool(owner.get("controller")) and (owner["kind"], group) == (SANDBOX, SANDBOX_GROUP)


def is_terminating(pod: KubeObject) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def has_left(pod: KubeObject) -> bool:
    """Return True if the pod was deleted and has ended or never ran, and only Kueue keeps it.

    Kueue's finalizer keeps the pod until another has taken its place, so its replacement must not
    wait until it is gone.
    """
    never_ran = not pod.get("spec", {}).get("nodeName")
    return (
        is_kept(pod)
        and is_terminating(pod)
        and (_status(pod).get("phase") == "Failed" or never_ran)
    )


def is_kept(pod: KubeObject) -> bool:
    """Return True if Kueue's finalizer keeps the pod until Kueue has recorded its end."""
    return KEPT_BY_KUEUE in pod["metadata"].get("finalizers", [])


def is_finished(pod: KubeObject) -> bool:
    return _status(pod).get("phase") in ("Succeeded", "Failed")


def is_succeeded(pod: KubeObject) -> bool:
    """Return True if all of its containers have ended with exit code 0."""
    return _status(pod).get("phase") == "Succeeded"


def ends_group(pod: KubeObject) -> bool:
    """Return True if the pod tells Kueue that its group ends once none of its pods runs."""
    return (pod["metadata"].get("annotations") or {}).get(ENDS_GROUP) == "false"


def gates(pod: KubeObject) -> list[str]:
    """Return the names of the pod's scheduling gates."""
    return [str(gate["name"]) for gate in pod.get("spec", {}).get("schedulingGates") or []]


def is_gated(pod: KubeObject) -> bool:
    return bool(gates(pod))


def queue(pod: KubeObject) -> str:
    """Return the pod's LocalQueue in Kueue; empty if it names none."""
    return labels(pod).get(LABEL_QUEUE, "")


def is_scheduled(pod: KubeObject) -> bool:
    """Return True if a scheduler has found a node for the pod, or if it runs anyway."""
    return _status(pod).get("phase") != "Pending" or _condition(pod, "PodScheduled") == "True"


def unscheduled_because(pod: KubeObject) -> str:
    return (
        _condition(pod, "PodScheduled", "message")
        if _condition(pod, "PodScheduled") == "False"
        else ""
    )


def is_ready(pod: KubeObject) -> bool:
    return not is_terminating(pod) and _condition(pod, "Ready") == "True"


def is_starting(pod: KubeObject) -> bool:
    """Return True if the pod has a node but not all of its containers have been started.

    Something that it needs may be missing.
    """
    return _status(pod).get("phase") == "Pending" and bool(pod.get("spec", {}).get("nodeName"))


def is_running(pod: KubeObject) -> bool:
    return _status(pod).get("phase") == "Running"


def age(stored: KubeObject, now: datetime) -> float:
    """Return the seconds since the object was created."""
    created = clock.parse_optional(stored["metadata"].get("creationTimestamp"))
    return (now - created).total_seconds() if created else 0.0


def started(pod: KubeObject) -> datetime | None:
    return clock.parse_optional(_status(pod).get("startTime"))


def disruption(pod: KubeObject) -> str:
    """Return why the cluster or another party ended the pod, in words; empty if it was not."""
    for kind in _DISRUPTED:
        if _condition(pod, kind) == "True":
            reason, message = _condition(pod, kind, "reason"), _condition(pod, kind, "message")
            return ": ".join(filter(None, (name(pod), reason or kind, message)))
    if is_terminating(pod):
        return f"{name(pod)} was deleted"
    reason = _status(pod).get("reason") or ""
    if _status(pod).get("phase") == "Failed" and (
        reason in _DISRUPTIONS or reason.startswith(_OUT_OF)
    ):
        return f"{name(pod)}: {reason}"
    return ""


def succeeded(pod: KubeObject) -> bool:
    """Return True if the role's main container, named like the role, has ended with exit code 0.

    A sidecar from a template may still run.
    """
    if is_succeeded(pod):
        return True
    return any(
        container == role(pod) and end.get("exitCode") == 0 for container, end in _terminated(pod)
    )


def runs_init(pod: KubeObject, container: str) -> bool:
    """Return True if this init container of the pod runs."""
    statuses = _status(pod).get("initContainerStatuses") or []
    return any(
        status["name"] == container and status.get("state", {}).get("running") is not None
        for status in statuses
    )


def init_succeeded(pod: KubeObject, container: str) -> bool:
    """Return True if this init container of the pod has ended with exit code 0."""
    statuses = _status(pod).get("initContainerStatuses") or []
    ends = (
        status.get("state", {}).get("terminated")
        for status in statuses
        if status["name"] == container
    )
    return any(end is not None and end.get("exitCode") == 0 for end in ends)


def has_ended(pod: KubeObject, container: str) -> bool:
    return any(name == container for name, _ in _terminated(pod))


def failures(pod: KubeObject, now: datetime) -> list[LastFailure]:
    """Return the containers that ended although they should not have, root causes first."""
    failed = [
        _failure(pod, container, end, now)
        for container, end in _terminated(pod)
        if end.get("exitCode") != 0 or container in _MUST_RUN
    ]
    if not failed and _status(pod).get("phase") == "Failed":
        failed = [_failure(pod, "", _status(pod), now)]
    return sorted(failed, key=root_cause_order)


def root_cause_order(failure: LastFailure) -> tuple[bool, datetime, bool]:
    """Return the sort key that puts root causes first.

    A container that lost another pod comes last, though it may have noticed before the end of that
    pod was reported. Of failures in the same second, a program's exit code comes before a signal,
    because a killed neighbour is mostly a consequence.
    """
    return lost_peer(failure), clock.parse(failure.time), (failure.exit_code or 0) > _SIGNALLED


def lost_peer(failure: LastFailure) -> bool:
    """Return True if a container ended because another pod of its gang did.

    sluice's own containers say so by their exit code, an engine by its last exception.
    """
    if failure.container != "engine":
        return failure.container in _WITH_CONTRACT and failure.exit_code == EXIT_PEER_LOST
    return bool(causes.lost_peer(last_exception(failure.message)))


def config_error(pod: KubeObject, now: datetime) -> LastFailure | None:
    """Return the failure of a container that asks not to be restarted; None if there is none."""
    with_contract = (f for f in failures(pod, now) if f.container in _WITH_CONTRACT)
    return next((f for f in with_contract if f.exit_code == EXIT_CONFIG_ERROR), None)


def headline(failure: LastFailure) -> str:
    """Return the failure in one line for people.

    That is the last line `error: ...` of the log, else the signal that killed the process, else its
    last exception or its last line.
    """
    prefix = f"{failure.container}: " if failure.container else ""
    lines = [line.strip() for line in failure.message.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if _signal_of(failure) and not (lines and lines[-1].startswith("error: ")):
        return prefix + _killed(failure)
    if errors or lines:
        return prefix + (errors or [last_exception(failure.message) or lines[-1]])[-1]
    return f"{prefix}{failure.reason or 'Error'}, exit code {failure.exit_code}"


def _killed(failure: LastFailure) -> str:
    """Describe a killed process by its signal and its last exception.

    Its last line would mislead, because it was killed while it worked.
    """
    text, exception = f"killed by {_signal_of(failure)}", last_exception(failure.message)
    if failure.reason == _OUT_OF_MEMORY:
        text += (
            "; it used more memory than its limit: raise "
            f"{memory_field(failure.role, failure.container)}"
        )
    elif failure.reason == OUT_OF_MACHINE:
        text += (
            "; the kernel's out-of-memory killer ended it, since the machine had no memory left: "
            f"{less_memory(failure.container)}"
        )
    elif exception:
        text += f" after {exception}"
    return text if failure.reason in ("", "Error") else f"{failure.reason}, {text}"


def _signal_of(failure: LastFailure) -> str:
    """Return the name of the signal that killed the process; empty if none did."""
    number = (failure.exit_code or 0) - _SIGNALLED
    return next((member.name for member in signal.Signals if member.value == number), "")


def last_failures(pod: KubeObject, now: datetime) -> list[LastFailure]:
    """Return how the containers of an engine's pod, which are started again, failed last."""
    return [
        _failure(pod, status["name"], end, now, "rollout")
        for status in container_statuses(pod)
        if (end := _last_end(status)) and (end.get("exitCode") != 0 or status["name"] in _MUST_RUN)
    ]


def _last_end(status: dict[str, Any]) -> dict[str, Any] | None:
    states = (status.get("state") or {}, status.get("lastState") or {})
    return next((end for state in states if (end := state.get("terminated"))), None)


def _failure(
    pod: KubeObject,
    container: str,
    end: dict[str, Any],
    now: datetime,
    in_role: RoleName | None = None,
) -> LastFailure:
    code = end.get("exitCode")
    role_name: RoleName = in_role or role(pod)  # type: ignore[assignment]
    message = end.get("message") or (UNEXPECTED_END.message if code == 0 else "")
    return LastFailure(
        role=role_name,
        pod=name(pod),
        container=container,
        reason=UNEXPECTED_END.name if code == 0 else end.get("reason") or "Error",
        exit_code=code,
        # Escaped, because any program in the pod can write it and terminals show it.
        message="\n".join(map(escaped, message[-_MESSAGE_LIMIT:].splitlines())),
        time=end.get("finishedAt") or clock.text(now),
    )


def _status(pod: KubeObject) -> dict[str, Any]:
    return pod.get("status") or {}


def container_statuses(pod: KubeObject) -> Iterator[dict[str, Any]]:
    yield from _status(pod).get("initContainerStatuses") or []
    yield from _status(pod).get("containerStatuses") or []


def has_ended_container(pod: KubeObject) -> bool:
    return any(_terminated(pod))


def _terminated(pod: KubeObject) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (container, how it ended), without init containers that have ended well."""
    for status in _status(pod).get("initContainerStatuses") or []:
        end = status.get("state", {}).get("terminated")
        if end and end.get("exitCode") != 0:
            yield status["name"], end
    for status in _status(pod).get("containerStatuses") or []:
        end = status.get("state", {}).get("terminated")
        if end:
            yield status["name"], end


def readiness(stored: KubeObject) -> tuple[str, str]:
    """Return (reason, message) of the condition Ready; both empty if there is none yet."""
    return _condition(stored, "Ready", "reason"), _condition(stored, "Ready", "message")


def _condition(pod: KubeObject, kind: str, field: str = "status") -> str:
    for condition in _status(pod).get("conditions") or []:
        if condition["type"] == kind:
            return str(condition.get(field, ""))
    return ""


_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: |:?$)")
_LONGEST = 300


def last_exception(log: str) -> str:
    """Return the exception at the end of a log's last traceback; empty if there is none.

    For example `RuntimeError: out of memory`. SGLang's scheduler is a separate process: when it
    raises, its parent kills the whole container, and the exception is some lines above the end of
    the log.
    """
    lines = [line for line in log.splitlines() if line.strip()]
    ends = [
        line
        for before, line in itertools.pairwise(lines)
        if before.startswith("  ") and _EXCEPTION.match(line)
    ]
    return ends[-1].strip()[:_LONGEST] if ends else ""
