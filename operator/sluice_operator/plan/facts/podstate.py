"""Reading one pod's status, the same for Kubernetes and for a laptop.

Everything is read from container statuses, not from the pod's phase: with restartPolicy Never a pod
with two containers is `Failed` only when both have ended, and an engine whose worker has died would
idle for ever.
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
_DISRUPTED = ("DisruptionTarget", "TerminationTarget")
"""Conditions that name a pod as a victim: Kubernetes' own, and Kueue's before it deletes pods of an
evicted group."""
_OUT_OF = "OutOf"
"""A kubelet that finds, when the pod arrives,
that it has not enough (OutOfcpu, OutOfnvidia.com/gpu)."""
_MUST_RUN = {"rendezvous", "buffer", "engine", "worker", "openenv"}
"""Containers that end only when the job does; of all others exit code 0 is a good end."""
_OURS = {"rendezvous", "buffer", "rows", "plugin", "engine", "worker", "trainer"}
"""Containers whose exit codes are those of docs/contracts.md. Another one's, the user's server or
sidecar, are its own: Go's panics have 2, and so has a Python that does not find its file."""
_OUT_OF_MEMORY = "OOMKilled"
OUT_OF_MACHINE = "SystemOOM"
"""A process that the kernel killed because the machine, not the container, had no memory left: a
kubelet's name of that event."""
_MESSAGE_LIMIT = 8192
_SIGNALLED = 128
"""Exit codes above it are 128 + the number of the signal that killed the process."""


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
    """How many pods the episode's place has had with it."""
    return int(labels(pod).get(LABEL_NUMBER, 0))


def address(pod: KubeObject) -> str:
    """Its IP address; empty: it has none yet."""
    return str(_status(pod).get("podIP") or "")


def group(pod: KubeObject) -> str:
    """The group that a queue admits it with; empty: it does not queue."""
    return labels(pod).get(LABEL_GROUP, "")


def sandbox(pod: KubeObject) -> str:
    """Name of the Sandbox that makes it, and would make it anew; empty: none does. A Sandbox that
    has no pod stands for it.
    """
    if pod.get("kind") == SANDBOX:
        return name(pod)
    owners = pod["metadata"].get("ownerReferences") or []
    return next((str(each["name"]) for each in owners if _is_sandbox(each)), "")


def _is_sandbox(owner: dict[str, Any]) -> bool:
    group = str(owner["apiVersion"]).partition("/")[0]
    return bool(owner.get("controller")) and (owner["kind"], group) == (SANDBOX, SANDBOX_GROUP)


def is_terminating(pod: KubeObject) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def has_left(pod: KubeObject) -> bool:
    """It was deleted and has failed of it, or never ran: only Kueue's finalizer keeps it.

    It does so until another pod has taken its place;
    so that one must not wait for this one to be gone.
    """
    never_ran = not pod.get("spec", {}).get("nodeName")
    return (
        is_kept(pod)
        and is_terminating(pod)
        and (_status(pod).get("phase") == "Failed" or never_ran)
    )


def is_kept(pod: KubeObject) -> bool:
    """Kueue keeps it until it has an account of its end."""
    return KEPT_BY_KUEUE in pod["metadata"].get("finalizers", [])


def is_finished(pod: KubeObject) -> bool:
    return _status(pod).get("phase") in ("Succeeded", "Failed")


def is_succeeded(pod: KubeObject) -> bool:
    """All of its containers have ended with exit code 0."""
    return _status(pod).get("phase") == "Succeeded"


def ends_group(pod: KubeObject) -> bool:
    """Kueue was told that the pod's group has ended when none of its pods runs."""
    return (pod["metadata"].get("annotations") or {}).get(ENDS_GROUP) == "false"


def gates(pod: KubeObject) -> list[str]:
    """The scheduling gates that keep it from a node."""
    return [str(gate["name"]) for gate in pod.get("spec", {}).get("schedulingGates") or []]


def is_gated(pod: KubeObject) -> bool:
    return bool(gates(pod))


def queue(pod: KubeObject) -> str:
    """The LocalQueue of Kueue that it waits in; empty: none is named."""
    return labels(pod).get(LABEL_QUEUE, "")


def is_scheduled(pod: KubeObject) -> bool:
    """A scheduler has found it a node; or it runs, whoever gave it one."""
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
    """It has its node, and not all of its containers were started: something that it needs may be
    missing there.
    """
    return _status(pod).get("phase") == "Pending" and bool(pod.get("spec", {}).get("nodeName"))


def is_running(pod: KubeObject) -> bool:
    return _status(pod).get("phase") == "Running"


def age(stored: KubeObject, now: datetime) -> float:
    """Seconds since it was created."""
    created = clock.parse_optional(stored["metadata"].get("creationTimestamp"))
    return (now - created).total_seconds() if created else 0.0


def started(pod: KubeObject) -> datetime | None:
    return clock.parse_optional(_status(pod).get("startTime"))


def disruption(pod: KubeObject) -> str:
    """The cause, in words, where the cluster or somebody else ended the pod; empty: nobody did."""
    for kind in _DISRUPTED:
        if _condition(pod, kind) == "True":
            why = _condition(pod, kind, "reason") or kind, _condition(pod, kind, "message")
            return ": ".join(filter(None, (name(pod), *why)))
    if is_terminating(pod):
        return f"{name(pod)} was deleted"
    reason = _status(pod).get("reason") or ""
    if _status(pod).get("phase") == "Failed" and (
        reason in _DISRUPTIONS or reason.startswith(_OUT_OF)
    ):
        return f"{name(pod)}: {reason}"
    return ""


def succeeded(pod: KubeObject) -> bool:
    """The role's own container (named like the role) has ended with exit code 0; a user's sidecar
    may still run.
    """
    if is_succeeded(pod):
        return True
    return any(
        container == role(pod) and end.get("exitCode") == 0 for container, end in _terminated(pod)
    )


def has_ended(pod: KubeObject, container: str) -> bool:
    return any(name == container for name, _ in _terminated(pod))


def failures(pod: KubeObject, now: datetime) -> list[LastFailure]:
    """Containers that ended although they should not have: root causes first.

    Of what died in the same second, exit codes of the program's own come before signals: a killed
    neighbour is mostly a consequence.
    """
    causes = [
        _failure(pod, container, end, now)
        for container, end in _terminated(pod)
        if end.get("exitCode") != 0 or container in _MUST_RUN
    ]
    if not causes and _status(pod).get("phase") == "Failed":
        causes = [_failure(pod, "", _status(pod), now)]
    return sorted(causes, key=root_cause_order)


def root_cause_order(failure: LastFailure) -> tuple[bool, datetime, bool]:
    """Whoever lost another pod comes last,
    though it may have noticed before that pod's end was told.
    """
    return lost_peer(failure), clock.parse(failure.time), (failure.exit_code or 0) > _SIGNALLED


def lost_peer(failure: LastFailure) -> bool:
    """True where a container ended because another pod of its gang did. Ours say so; an engine's
    exception tells.
    """
    if failure.container != "engine":
        return failure.container in _OURS and failure.exit_code == EXIT_PEER_LOST
    return bool(causes.lost_peer(last_exception(failure.message)))


def config_error(pod: KubeObject, now: datetime) -> LastFailure | None:
    """The end of a container of ours that asks for no restart; None: there is none."""
    ours = (f for f in failures(pod, now) if f.container in _OURS)
    return next((f for f in ours if f.exit_code == EXIT_CONFIG_ERROR), None)


def headline(failure: LastFailure) -> str:
    """The one line for people: a process's last `error: ...`, else what killed it, else its last
    exception, or line.
    """
    where = f"{failure.container}: " if failure.container else ""
    lines = [line.strip() for line in failure.message.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if _signal_of(failure) and not (lines and lines[-1].startswith("error: ")):
        return where + _killed(failure)
    if errors or lines:
        return where + (errors or [last_exception(failure.message) or lines[-1]])[-1]
    return f"{where}{failure.reason or 'Error'}, exit code {failure.exit_code}"


def _killed(failure: LastFailure) -> str:
    """A process that was killed had no time for last words: its last line would mislead, an
    exception does not.
    """
    text, exception = f"killed by {_signal_of(failure)}", last_exception(failure.message)
    if failure.reason == _OUT_OF_MEMORY:
        text += (
            "; it used more memory than it may: raise "
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
    """Name of the signal that killed the process; empty: none did."""
    number = (failure.exit_code or 0) - _SIGNALLED
    return next((member.name for member in signal.Signals if member.value == number), "")


def _failure(pod: KubeObject, container: str, end: dict[str, Any], now: datetime) -> LastFailure:
    code = end.get("exitCode")
    role_name: RoleName = role(pod)  # type: ignore[assignment]
    words = end.get("message") or (UNEXPECTED_END.message if code == 0 else "")
    return LastFailure(
        role=role_name,
        pod=name(pod),
        container=container,
        reason=UNEXPECTED_END.name if code == 0 else end.get("reason") or "Error",
        exit_code=code,
        # From any program in the pod, and on its way to people's terminals.
        message="\n".join(map(escaped, words[-_MESSAGE_LIMIT:].splitlines())),
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
    """(container, how it ended). An init container that did its work has not ended in
    this sense.
    """
    for status in _status(pod).get("initContainerStatuses") or []:
        end = status.get("state", {}).get("terminated")
        if end and end.get("exitCode") != 0:
            yield status["name"], end
    for status in _status(pod).get("containerStatuses") or []:
        end = status.get("state", {}).get("terminated")
        if end:
            yield status["name"], end


def readiness(stored: KubeObject) -> tuple[str, str]:
    """(reason, message) of its condition Ready; empty where it has none yet."""
    return _condition(stored, "Ready", "reason"), _condition(stored, "Ready", "message")


def _condition(pod: KubeObject, kind: str, field: str = "status") -> str:
    for condition in _status(pod).get("conditions") or []:
        if condition["type"] == kind:
            return str(condition.get(field, ""))
    return ""


_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: |:?$)")
_LONGEST = 300


def last_exception(log: str) -> str:
    """`RuntimeError: out of memory`: the line behind the last frames of a traceback; empty: there
    is none.
    """
    lines = [line for line in log.splitlines() if line.strip()]
    ends = [
        line
        for before, line in itertools.pairwise(lines)
        if before.startswith("  ") and _EXCEPTION.match(line)
    ]
    return ends[-1].strip()[:_LONGEST] if ends else ""
