"""Jobs in short, as `Client.list` and `sluice list` give them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sluice.api import FINISHED, RLJobStatus
from sluice.telemetry.run_directory import JOB
from sluice_client.status_view import status_of
from sluice_operator.cluster.local.run_state import RunDirectoryError, StateFile, is_locked


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job in short.

    `where` is `namespace/name` for a job of a cluster, and the run directory for a run of this
    machine. `started` is an ISO 8601 time.
    """

    name: str
    where: str
    state: str
    step: int | None = None
    total_steps: int | None = None
    reward: str | None = None
    restarts: int = 0
    started: str | None = None

    def facts(self) -> dict[str, Any]:
        """Return the entry of `sluice list -o json`."""
        facts = asdict(self)
        return facts | {"totalSteps": facts.pop("total_steps")}


def local_jobs(directory: Path) -> list[JobSummary]:
    """List the runs in `directory`. A run whose state cannot be read is listed as Unreadable."""
    return [_summary_of_run(path.parent) for path in sorted(directory.glob(f"*/{JOB}"))]


def _summary_of_run(directory: Path) -> JobSummary:
    try:
        metadata = json.loads((directory / JOB).read_text())["metadata"]
        name = str(metadata["name"])
        status = status_of({"status": StateFile(directory).load().status})
    except (OSError, ValueError, KeyError, RunDirectoryError):
        return JobSummary(directory.name, str(directory), "Unreadable")
    state = status.state if status.state in FINISHED or is_locked(directory) else "Stopped"
    # A stopped run has no start time in its status: the clocks of its deadlines do not run.
    started = metadata.get("creationTimestamp") or status.start_time
    return replace(_summary(name, str(directory), state, status), started=started)


def cluster_job(stored: dict[str, Any]) -> JobSummary:
    """Summarize an RLJob object as the API server returns it."""
    metadata, status = stored["metadata"], status_of(stored)
    where = f"{metadata['namespace']}/{metadata['name']}"
    return _summary(metadata["name"], where, status.state or "Pending", status)


def _summary(name: str, where: str, state: str, status: RLJobStatus) -> JobSummary:
    return JobSummary(
        name,
        where,
        state,
        status.step,
        status.total_steps,
        status.reward,
        status.restarts,
        status.start_time,
    )
