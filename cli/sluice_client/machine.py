"""Runs of this machine: each is a `sluice run` in the background, which outlives its submitter."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from sluice.api import FINISHED, manifest
from sluice.telemetry import run_directory
from sluice_cli.run import run_dir
from sluice_cli.status.listing import Listed, runs_of
from sluice_client.errors import ClientError
from sluice_client.files import Submission
from sluice_operator.cluster.local import run_state
from sluice_operator.cluster.local.reader import RunReader

START_SECONDS, STOP_SECONDS, LOOK_SECONDS = 120.0, 120.0, 0.2
_SUBMITTED = ".submitted"
"""Beside the runs: for each its manifest, its files, and what `sluice run` prints."""


class Machine:
    """A directory of runs."""

    here = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    async def submit(self, submission: Submission) -> str:
        name = submission.job.metadata.name
        if (self._directory / name / run_directory.JOB).exists():
            raise ClientError(
                f"{self._directory / name} holds a run already: go on with get({name!r}), or "
                "submit under another name"
            )
        place = self._directory / _SUBMITTED / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for file, text in submission.files.items():
            (place / file).write_text(text)
        document = manifest(submission.placed(str(place)))
        run_directory.write_json(place / run_directory.JOB, document)
        await self._start(name)
        return name

    def reader(self, name: str) -> RunReader:
        return RunReader(self._directory / name)

    async def listed(self) -> list[Listed]:
        return runs_of(self._directory)

    async def suspend(self, name: str, suspend: bool) -> None:
        await (self._stop(name) if suspend else self._start(name))

    async def scale(self, name: str, replicas: int) -> None:
        raise ClientError(
            f"a run of this machine keeps its engines; submit {name} anew with "
            f"overrides={{'rollout.replicas': {replicas}}}"
        )

    async def delete(self, name: str) -> None:
        await self._stop(name)
        await asyncio.to_thread(run_dir.delete, self._directory / name)
        shutil.rmtree(self._directory / _SUBMITTED / name, ignore_errors=True)

    async def records(self, name: str, file: str) -> list[dict[str, Any]]:
        return list(run_directory.records(self._directory / name / file))

    async def newest(self, name: str, pattern: str) -> str | None:
        directory = self._directory / name
        files = sorted(directory.glob(pattern))
        return str(files[-1].relative_to(directory)) if files else None

    async def close(self) -> None:
        """Runs go on."""

    async def _start(self, name: str) -> None:
        """Start or continue a run. Answers once it works, or raises with its last words."""
        place, directory = self._directory / _SUBMITTED / name, self._directory / name
        manifest = place / run_directory.JOB
        if not manifest.exists():
            raise ClientError(f"{manifest} is missing: {name} was not submitted from here")
        if run_state.held(directory):
            return
        command = [sys.executable, "-m", "sluice_cli", "run", str(manifest), "--plain"]
        with (place / "output.log").open("wb") as output:
            process = self._started[name] = subprocess.Popen(
                [*command, "--run-dir", str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        await _until(
            lambda: process.poll() is not None or (directory / run_state.STATE_FILE).exists(),
            START_SECONDS,
            f"{name} has not started; see {place / 'output.log'}",
        )
        if process.poll() not in (None, 0):
            raise ClientError((place / "output.log").read_text().strip()[-4000:])

    async def _stop(self, name: str) -> None:
        """End the run's processes; what is trained is saved. One that has ended may still be
        writing its report: then wait for that.
        """
        directory = self._directory / name
        if not run_state.held(directory):
            return
        status = run_state.StateFile(directory).load().status or {}
        if status.get("state") not in FINISHED:
            os.kill(json.loads((directory / run_state.LOCK_FILE).read_text())["pid"], signal.SIGINT)
        waiting = self._started.pop(name, None)
        await _until(lambda: not run_state.held(directory), STOP_SECONDS, f"{name} has not stopped")
        if waiting:
            await asyncio.to_thread(waiting.wait)


async def _until(done: Any, seconds: float, otherwise: str) -> None:
    """Wait for a condition. Raises ClientError after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            while not done():
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise ClientError(f"{otherwise} (waited {seconds:.0f} s)") from None
