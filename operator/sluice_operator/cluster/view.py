"""One job as people want to look at it, wherever it runs: what a cluster, or a run directory, can
be asked for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.model import KubeObject

TimedLine = tuple[datetime, str]
"""A line of a log, and when it was written."""


class ReadError(RuntimeError):
    """It cannot be read. The text says what, and what to do."""


class MissingJobError(ReadError):
    """There is no job of this name. The text says which there are."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event. about: the pod that it is about; empty: the job. count: how often it was seen."""

    time: datetime
    type: str
    reason: str
    message: str
    about: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A job as it is stored, its pods and its events.

    where: cluster namespace or run directory, in words. notes: what could not be read. directory:
    of a run of this machine; None: the job is in a cluster.
    """

    where: str
    job: KubeObject
    pods: tuple[KubeObject, ...] = ()
    events: tuple[JobEvent, ...] = ()
    notes: tuple[str, ...] = ()
    directory: Path | None = None

    def facts(self) -> dict[str, Any]:
        """For programs: the job as the API has it, its pods in short, its events. No secrets."""
        return {
            "where": self.where,
            "job": self.job,
            "pods": [_pod_facts(pod) for pod in self.pods],
            "events": [asdict(each) | {"time": clock.text(each.time)} for each in self.events],
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
    """One container's log. silent: why there is none yet; empty: there is one, or there was."""

    pod: str
    container: str
    role: str
    replica: int
    attempt: int
    index: int
    silent: str = ""

    @property
    def name(self) -> str:
        """The pod without its job; with the container where the role has several."""
        pod = f"{self.role}-{self.replica}-{self.attempt}-{self.index}"
        return pod if self.container == self.role else f"{pod}/{self.container}"


class Reader(Protocol):
    async def snapshot(self) -> JobSnapshot:
        """The snapshot that `sluice status` shows. Raises ReadError."""
        ...

    async def streams(self) -> tuple[list[LogStream], bool]:
        """The logs that there are; and whether the job has ended, so that no more will come.

        ReadError.
        """
        ...

    def lines(
        self, stream: LogStream, *, follow: bool, tail: int | None
    ) -> AsyncIterator[TimedLine]:
        """A log from its beginning, or its last lines.

        follow: until the container has ended. ReadError.
        """
        ...


def log_streams(pod: KubeObject) -> list[LogStream]:
    """The logs of a pod's containers."""
    waiting = {each["name"]: _silence(each) for each in podstate.container_statuses(pod)}
    nowhere = podstate.unscheduled_because(pod) or "the pod waits for a node"
    return [
        LogStream(
            podstate.name(pod),
            container["name"],
            podstate.role(pod),
            podstate.replica(pod),
            podstate.attempt(pod),
            podstate.index(pod),
            waiting.get(container["name"], "" if podstate.is_running(pod) else nowhere),
        )
        for container in (pod.get("spec") or {}).get("containers") or []
    ]


def _silence(status: KubeObject) -> str:
    """Why a container has written nothing; empty: it runs or has run."""
    waits = (status.get("state") or {}).get("waiting")
    if waits is None or status.get("lastState"):
        return ""
    return ": ".join(filter(None, (waits.get("reason") or "waiting", waits.get("message"))))
