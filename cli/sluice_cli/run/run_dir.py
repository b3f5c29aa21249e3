"""The directory of a run of this machine: locked, accepted for a job, or deleted."""

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
from sluice.telemetry import run_directory, steady
from sluice_cli.run.resume_changes import accepted
from sluice_operator.cluster.local import run_state
from sluice_operator.plan.facts import clock

# Longest wait for a run that is just ending.
LOCK_SECONDS = 10.0


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Hold the lock of a run directory, which is made if it is not there; yield its descriptor.

    Raises ManifestError, before anything is written, if the directory holds other files than a
    run's, and RunDirectoryError if a run works in it.
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


def prepare(directory: Path, job: RLJob, *, fresh: bool) -> Prepared:
    """Accept a run directory, whose lock is held, for a job, and record the job in it.

    fresh: delete the run that the directory holds. Raises ManifestError, and changes nothing, if
    the directory holds a run that cannot go on with this job.
    """
    record, changed, document = directory / run_directory.JOB, list[Change](), manifest(job)
    created = clock.text(steady.now())
    if fresh:
        clear(directory)
    if record.exists():
        stored = read_json(record)
        created = stored["metadata"].get("creationTimestamp", created)
        try:
            changed = accepted(stored["spec"], job, document["spec"], trained_steps(directory))
        except ManifestError as error:
            raise ManifestError(
                f"{directory} holds a run of another manifest:\n{error}\n"
                "use another --run-dir, or --fresh to delete that run and start anew"
            ) from error
    status = run_state.StateFile(directory).load().status or {}
    document["metadata"]["creationTimestamp"] = created
    run_directory.write_json(record, document)
    return Prepared(changed, succeeded=status.get("state") == "Succeeded")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run directory that is ready for a job.

    changed: fields that differ from those the run was started with. succeeded: the run that the
    directory holds has ended so.
    """

    changed: list[Change]
    succeeded: bool = False


def trained_steps(directory: Path) -> int:
    """The last step of the run that a directory holds; 0: none yet."""
    return max(run_directory.by_step(directory / run_directory.METRICS), default=0)


def delete(directory: Path) -> None:
    """Delete a run with its directory. Raises RunDirectoryError if it is going on."""
    lock = asyncio.run(run_state.lock(directory, LOCK_SECONDS))
    try:
        shutil.rmtree(directory)
    finally:
        os.close(lock)


def clear(directory: Path) -> None:
    """Delete all files of a run but its lock, which the caller holds."""
    # The record goes last: without it, what a crash leaves would count as somebody else's files.
    for path in sorted(directory.iterdir(), key=lambda path: path.name == run_directory.JOB):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != run_state.LOCK_FILE:
            path.unlink()


def read_json(path: Path) -> Any:
    """A file of a run. Raises ManifestError where something has broken it."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ManifestError(f"{path}: not valid JSON ({error}); use another --run-dir") from error
