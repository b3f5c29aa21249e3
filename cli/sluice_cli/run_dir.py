"""The directory of a run of this machine: made, accepted as it is, or deleted."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

from sluice.api import ManifestError, RLJob, manifest
from sluice.api.changes import Change
from sluice.telemetry import run_directory
from sluice_cli.continued import accepted
from sluice_operator.cluster.local import run_state

LOCK_SECONDS = 5.0
"""Longest wait for a run that is just ending."""


def prepare(directory: Path, job: RLJob, *, fresh: bool) -> list[Change]:
    """Make or accept the run directory; the fields with which an earlier run goes on anew.

    Raises ManifestError where that is not the same run any more.
    """
    known, changes = directory / run_directory.JOB, list[Change]()
    if fresh and known.exists():
        delete(directory)
    if known.exists():
        try:
            changes = accepted(
                read_json(known)["spec"], job, manifest(job)["spec"], trained_steps(directory)
            )
        except ManifestError as error:
            raise ManifestError(
                f"{directory} holds a run of another manifest:\n{error}\n"
                "use another --run-dir, or --fresh to delete that run and start anew"
            ) from error
    elif directory.exists() and any(directory.iterdir()):
        raise ManifestError(f"{directory} is not empty and holds no run; use another --run-dir")
    directory.mkdir(parents=True, exist_ok=True)
    run_directory.write_json(known, manifest(job))
    return changes


def trained_steps(directory: Path) -> int:
    """The last step of the run that a directory holds; 0: none yet."""
    return max(run_directory.by_step(directory / run_directory.METRICS), default=0)


def delete(directory: Path) -> None:
    """Delete a run, unless it is going on. Raises RunDirectoryError then."""
    lock = asyncio.run(run_state.lock(directory, LOCK_SECONDS))
    try:
        shutil.rmtree(directory)
    finally:
        os.close(lock)


def read_json(path: Path) -> Any:
    """A file of a run. Raises ManifestError where something has broken it."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ManifestError(f"{path}: not valid JSON ({error}); use another --run-dir") from error
