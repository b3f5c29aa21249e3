"""`sluice track`: send a run to its trackers, or to another one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NoReturn

import typer

from sluice.api import RLJob
from sluice.api.groups.telemetry import Telemetry
from sluice.runtime import pod_env
from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry import run_directory
from sluice.trackers.following import Follower
from sluice.trackers.settings import TrackerSettings, trackers_of
from sluice_cli.exits import Exit


def track(directory: Path, to: str | None, project: str | None) -> None:
    """Send what the trackers of a run do not have yet. Raises Exit if one of them fails."""
    job = _job(directory)
    if to is not None:
        own = {"type": to} | ({"project": project} if project else {})
        telemetry = Telemetry.model_validate({"trackers": [own]})
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"telemetry": telemetry})})
    elif project is not None:
        _invalid("--project needs --to: the job's own trackers have theirs")
    trackers = trackers_of(job, directory, os.environ)
    if not trackers:
        _invalid(
            f"{directory}: the job has no trackers (telemetry.trackers): name one, such as "
            "--to wandb"
        )
    failed = [tracker for tracker in trackers if _send(directory, tracker)]
    if failed:
        raise typer.Exit(Exit.FAILED)


def _send(directory: Path, tracker: TrackerSettings) -> bool:
    """Send to one tracker and say how much. Returns True if it failed."""
    before = Follower(directory, tracker.position, 0).left()
    if not before:
        typer.echo(f"{tracker.name}: nothing new")
        return False
    ended = subprocess.run(tracker.command(directory, limit=0), stdin=subprocess.DEVNULL)
    left = Follower(directory, tracker.position, 0).left()
    typer.echo(f"{tracker.name}: {before - left} records sent" + (f", {left} not" if left else ""))
    return ended.returncode != 0 or left > 0


def _job(directory: Path) -> RLJob:
    file = directory / run_directory.JOB
    if not file.exists():
        _invalid(f"{directory} has no {file.name}; expected the directory of a run")
    try:
        return pod_env.read_job(file)
    except ConfigurationError as error:
        _invalid(str(error))


def _invalid(problem: str) -> NoReturn:
    typer.echo(f"error: {problem}", err=True)
    raise typer.Exit(Exit.INVALID)
