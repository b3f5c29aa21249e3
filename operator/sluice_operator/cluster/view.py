"""A job as `sluice status` and `sluice logs` show it, read from a cluster or a run directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.model import KubeObject

TimedLine = tuple[datetime, str]  # a line of a log, with the time at which it was written


class ReadError(RuntimeError):
    """A job cannot be read. The text says what to do."""


class MissingJobError(ReadError):
    """There is no job of this name. The text says which jobs there are."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of a job or one of its pods."""

    time: datetime
    type: str
    reason: str
    message: str
    about: str = ""  # name of the pod; empty for the job
    count: int = 1  # how often it was seen


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A job as it is stored, with its pods and its events."""

    where: str  # namespace or run directory, in words
    job: KubeObject
    pods: tuple[KubeObject, ...] = ()
    events: tuple[JobEvent, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be read
    directory: Path | None = None  # of a run on this machine; None for a job in a cluster

    def facts(self) -> dict[str, Any]:
        """Return the snapshot for programs: the job, a summary of its pods, its events.

        It contains no secrets.
        """
        return {
            "where": self.where,
            "job": self.job,
            "pods": [_pod_facts(pod) for pod in self.pods],
            "events": [asdict(event) | {"time": clock.text(event.time)} for event in self.events],
            "notes": list(self.notes),
        }


def _pod_facts(pod: KubeObject) -> dict[str, Any]:
    return {
        "name": podstate.name(pod),
        "role": podstate.role(pod),
        "replica": podstate.replica(pod),
        "attempt": podstate.attempt(pod),
        "phase": (pod.get("status") or {}).get("phase", "Pending"),
        "ready": podstate.is_ready(pod),
        "node": (pod.get("spec") or {}).get("nodeName"),
    }


@dataclass(frozen=True, slots=True)
class LogStream:
    """The log of one container. silent: why the container has written no log yet; or empty."""

    pod: str
    container: str
    role: str
    replica: int
    attempt: int
    index: int
    silent: str = ""

    @property
    def name(self) -> str:
        """The pod's name without that of its job, and the container if the role has several."""
        pod = f"{self.role}-{self.replica}-{self.attempt}-{self.index}"
        return pod if self.container == self.role else f"{pod}/{self.container}"


class Reader(Protocol):
    async def snapshot(self) -> JobSnapshot:
        """Return what `sluice status` shows. Raises ReadError."""
        ...

    async def streams(self) -> tuple[list[LogStream], bool]:
        """Return the logs that exist, and True if the job has ended, so that no others follow.

        Raises ReadError.
        """
        ...

    def lines(
        self, stream: LogStream, *, follow: bool, tail: int | None
    ) -> AsyncIterator[TimedLine]:
        """Yield a log from its beginning, or its last `tail` lines.

        With `follow` the log is read until the container has ended. Raises ReadError.
        """
        ...


def log_streams(pod: KubeObject) -> list[LogStream]:
    """Return the logs of a pod's containers."""
    silent = {status["name"]: _silence(status) for status in podstate.container_statuses(pod)}
    unscheduled = podstate.unscheduled_because(pod) or "the pod waits for a node"
    return [
        LogStream(
            podstate.name(pod),
            container["name"],
            podstate.role(pod),
            podstate.replica(pod),
            podstate.attempt(pod),
            podstate.index(pod),
            silent.get(container["name"], "" if podstate.is_running(pod) else unscheduled),
        )
        for container in (pod.get("spec") or {}).get("containers") or []
    ]


def _silence(status: KubeObject) -> str:
    """Return why a container has written no log; empty if it runs or has run."""
    waits = (status.get("state") or {}).get("waiting")
    if waits is None or status.get("lastState"):
        return ""
    return ": ".join(filter(None, (waits.get("reason") or "waiting", waits.get("message"))))
