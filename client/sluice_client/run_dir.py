"""Lock, prepare and delete the directory of a run of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.api import ManifestError, RLJob, manifest
from sluice.api.schema.mutability import Change
from sluice.api.schema.renamed_fields import migrate_spec
from sluice.telemetry import run_directory, steady
from sluice_client.resume_changes import accepted_changes
from sluice_operator.cluster.local import run_state
from sluice_operator.plan.facts import clock

# Seconds to wait for the lock of a run that is just ending.
LOCK_SECONDS = 10.0


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Create a run directory if needed, hold its lock, and yield the lock's file descriptor.

    Raises ManifestError if the directory holds files but no run, and RunDirectoryError if another
    process runs a job in it. Neither changes the directory.
    """
    holds_run = (directory / run_directory.JOB).exists()
    if not holds_run and directory.exists() and set(os.listdir(directory)) - {run_state.LOCK_FILE}:
        raise ManifestError(f"{directory} is not empty and holds no run; use another --run-dir")
    directory.mkdir(parents=True, exist_ok=True)
    lock = asyncio.run(run_state.lock(directory, LOCK_SECONDS))
    try:
        yield lock
    finally:
        os.close(lock)


def prepare(directory: Path, job: RLJob, *, fresh: bool) -> PreparedRun:
    """Record a job in a run directory, whose lock the caller holds.

    Parameters
    ----------
    directory
        Empty, or the directory of an earlier run that goes on.
    job
        The job as it runs from now on.
    fresh
        Delete the run that the directory holds.

    Raises
    ------
    ManifestError
        If the run in the directory cannot go on with this job. The directory stays as it was.

    """
    record, changed, document = directory / run_directory.JOB, list[Change](), manifest(job)
    created = clock.text(steady.now())
    if fresh:
        clear(directory)
    if record.exists():
        stored = read_json(record)
        created = stored["metadata"].get("creationTimestamp", created)
        migrate_spec(stored["spec"])  # an earlier version of sluice may have started the run
        try:
            changed = accepted_changes(
                stored["spec"], job, document["spec"], trained_steps(directory)
            )
        except ManifestError as error:
            raise ManifestError(
                f"{directory} holds a run of another manifest:\n{error}\n"
                "use another --run-dir, or --fresh to delete that run and start over"
            ) from error
    status = run_state.StateFile(directory).load().status or {}
    document["metadata"]["creationTimestamp"] = created
    run_directory.write_json(record, document)
    return PreparedRun(changed, succeeded=status.get("state") == "Succeeded")


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Facts about the earlier run in a directory that is ready for a job."""

    # Fields that differ from the earlier manifest.
    changed: list[Change]
    # The earlier run has succeeded.
    succeeded: bool = False


def trained_steps(directory: Path) -> int:
    """Return the last trained step of a run; 0 before the first step."""
    return max(run_directory.by_step(directory / run_directory.METRICS), default=0)


def delete(directory: Path) -> None:
    """Delete a run with its directory. Raises RunDirectoryError if the run goes on."""
    lock = asyncio.run(run_state.lock(directory, LOCK_SECONDS))
    try:
        shutil.rmtree(directory)
    finally:
        os.close(lock)


def clear(directory: Path) -> None:
    """Delete all files of a run except its lock, which the caller holds."""
    # The record goes last: `locked` takes files without a record for files of another program.
    for path in sorted(directory.iterdir(), key=lambda path: path.name == run_directory.JOB):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != run_state.LOCK_FILE:
            path.unlink()


def read_json(path: Path) -> Any:
    """Read a file of a run. Raises ManifestError if it is not valid JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ManifestError(f"{path}: not valid JSON ({error}); use another --run-dir") from error
