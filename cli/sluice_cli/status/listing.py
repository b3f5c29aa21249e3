"""`sluice list`: runs of this machine, and jobs of a cluster."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sluice.api import FINISHED, RLJobStatus
from sluice.telemetry.run_directory import JOB
from sluice_cli.output import Format, written
from sluice_cli.status import jobs
from sluice_cli.status.view import status_of
from sluice_operator.cluster.local.run_state import RunDirectoryError, StateFile, held

COLUMNS = ("name", "where", "state", "step", "reward", "restarts", "started")


@dataclass(frozen=True, slots=True)
class Listed:
    """One job. where: `namespace/NAME` of a cluster, or the run's directory. The shape of
    `sluice list -o json`.
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
        facts = asdict(self)
        return facts | {"totalSteps": facts.pop("total_steps")}

    def row(self) -> list[str]:
        facts = asdict(self) | {"step": _of(self.step, self.total_steps)}
        return ["-" if facts[name] is None else str(facts[name]) for name in COLUMNS]


def listed(directory: Path, namespace: str | None, *, everywhere: bool, form: Format) -> str:
    """All that there is, the newest first. ReadError: a cluster that was asked for is silent."""
    rows = sorted(runs_of(directory), key=lambda each: each.started or "", reverse=True)
    stored, silence = asyncio.run(jobs.stored(namespace, everywhere=everywhere))
    rows += [of_cluster(each) for each in stored]
    if form is not Format.TEXT:
        return written([each.facts() for each in rows], form)
    text = _table(rows) if rows else f"no run in {directory}, and no job of a cluster"
    return f"{text}\nnote: {silence}" if silence else text


def runs_of(directory: Path) -> list[Listed]:
    """Runs of this machine. One whose state cannot be read is listed as Unreadable."""
    return [_run(path.parent) for path in sorted(directory.glob(f"*/{JOB}"))]


def _run(directory: Path) -> Listed:
    try:
        metadata = json.loads((directory / JOB).read_text())["metadata"]
        name = str(metadata["name"])
        status = status_of({"status": StateFile(directory).load().status})
    except (OSError, ValueError, KeyError, RunDirectoryError):
        return Listed(directory.name, str(directory), "Unreadable")
    state = status.state if status.state in FINISHED or held(directory) else "Stopped"
    # The status tells when the clocks of its deadlines began, which a stopped run has not.
    started = metadata.get("creationTimestamp") or status.start_time
    return replace(_listed(name, str(directory), state, status), started=started)


def of_cluster(stored: dict[str, Any]) -> Listed:
    """A job as a cluster stores it."""
    metadata, status = stored["metadata"], status_of(stored)
    where = f"{metadata['namespace']}/{metadata['name']}"
    return _listed(metadata["name"], where, status.state or "Pending", status)


def _listed(name: str, where: str, state: str, status: RLJobStatus) -> Listed:
    return Listed(
        name,
        where,
        state,
        status.step,
        status.total_steps,
        status.reward,
        status.restarts,
        status.start_time,
    )


def _of(step: int | None, total: int | None) -> str | None:
    return None if step is None else f"{step}/{total}" if total else str(step)


def _table(rows: list[Listed]) -> str:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in COLUMNS:
        table.add_column(name, no_wrap=True)
    for each in rows:
        table.add_row(*each.row())
    text = io.StringIO()
    Console(file=text, width=200, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
