"""Runs of this machine. A run is a `sluice run` in the background that outlives its submitter."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.api import FINISHED, manifest
from sluice.telemetry import run_directory
from sluice_client import run_dir
from sluice_client.errors import ClientError
from sluice_client.job_list import JobSummary, local_jobs
from sluice_client.pool_list import PoolSummary, answering_engines, local_pool
from sluice_client.submission import Submission
from sluice_operator.cluster.local import pools, run_state
from sluice_operator.cluster.local.reader import RunReader

START_SECONDS, STOP_SECONDS, POLL_SECONDS = 120.0, 120.0, 0.2
# Folder among the runs with the manifest, the files and the output of every submitted run.
_SUBMITTED = ".submitted"


class LocalRuns:
    """A directory of runs."""

    shares_files = True
    no_pool = "none runs on this machine; start it with `sluice pool up`"

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    async def submit(self, submission: Submission) -> str:
        name = submission.job.metadata.name
        if (self._directory / name / run_directory.JOB).exists():
            raise ClientError(
                f"{self._directory / name} already holds a run: use get({name!r}), or submit under "
                "another name"
            )
        folder = self._directory / _SUBMITTED / name
        # Left over from a run of this name whose directory was deleted by hand.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, text in submission.files.items():
            (folder / file).write_text(text)
        document = manifest(submission.placed(str(folder)))
        run_directory.write_json(folder / run_directory.JOB, document)
        await self._start(name)
        return name

    def reader(self, name: str) -> RunReader:
        return RunReader(self._directory / name)

    async def list_jobs(self) -> list[JobSummary]:
        return local_jobs(self._directory)

    async def list_pools(self) -> list[PoolSummary]:
        found = pools.running()
        return list(map(local_pool, found, await answering_engines(found)))

    async def suspend(self, name: str, suspend: bool) -> None:
        await (self._stop(name) if suspend else self._start(name))

    async def scale(self, name: str, replicas: int) -> None:
        raise ClientError(
            f"a run of this machine cannot change its engines; submit {name} again with "
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
        """Do nothing: runs go on without a client."""

    async def _start(self, name: str) -> None:
        """Start or continue a run, and return once it works.

        Raises ClientError, with the last lines of its output, if the run ends at once.
        """
        folder, directory = self._directory / _SUBMITTED / name, self._directory / name
        manifest = folder / run_directory.JOB
        if not manifest.exists():
            raise ClientError(f"{manifest} is missing: the client did not submit {name}")
        if run_state.is_locked(directory):
            return
        # The command line is started as a program: this package does not import it.
        command = [sys.executable, "-m", "sluice_cli", "run", str(manifest), "--plain"]
        with (folder / "output.log").open("wb") as output:
            process = self._started[name] = subprocess.Popen(
                [*command, "--run-dir", str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the notebook's terminal must not stop the run.
                start_new_session=True,
            )
        # The state file appears once the manifest and the files have passed their checks.
        await _until(
            lambda: process.poll() is not None or (directory / run_state.STATE_FILE).exists(),
            START_SECONDS,
            f"{name} has not started; see {folder / 'output.log'}",
        )
        if process.poll() not in (None, 0):
            raise ClientError((folder / "output.log").read_text().strip()[-4000:])

    async def _stop(self, name: str) -> None:
        """Stop the run, which saves what is trained, and wait until its process has ended."""
        directory = self._directory / name
        if not run_state.is_locked(directory):
            return
        status = run_state.StateFile(directory).load().status or {}
        # The process of a finished run may still be writing its report: no signal for it.
        if status.get("state") not in FINISHED:
            os.kill(json.loads((directory / run_state.LOCK_FILE).read_text())["pid"], signal.SIGINT)
        # A run of an earlier session is no child of this process: only its lock tells its end.
        process = self._started.pop(name, None)
        await _until(
            lambda: not run_state.is_locked(directory), STOP_SECONDS, f"{name} has not stopped"
        )
        if process:
            await asyncio.to_thread(process.wait)


async def _until(condition: Callable[[], bool], seconds: float, failure: str) -> None:
    """Wait for a condition. Raises ClientError with `failure` after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise ClientError(f"{failure} (waited {seconds:.0f} s)") from None
