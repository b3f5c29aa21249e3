"""Runs of this machine, as the client ends and deletes them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sluice_client.local_runs import LocalRuns
from sluice_operator.cluster.local import run_state
from tests.integration.local_cluster.local_jobs import until

WRITER = """
import asyncio, signal, sys, time
from pathlib import Path
from sluice_operator.cluster.local import run_state

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a shell's background job
directory, state_file = Path(sys.argv[1]), run_state.StateFile(Path(sys.argv[1]))
lock = asyncio.run(run_state.lock(directory, 1.0))
try:
    state = state_file.load()
    state.status = {"state": sys.argv[2]}
    state_file.save(state)
    time.sleep(float(sys.argv[3]))
except KeyboardInterrupt:
    sys.exit(130)
(directory / "report.html").write_text("the last of a run's files")
"""
Process = subprocess.Popen[bytes]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    run = tmp_path / "runs/job"
    run.mkdir(parents=True)
    return run


@pytest.fixture
def run(directory: Path) -> Iterator[Callable[[str, float], Awaitable[Process]]]:
    """Starts a process that holds the run's directory for a time, and writes its last file then."""
    started: list[Process] = []

    async def start(state: str, seconds: float) -> Process:
        command = [sys.executable, "-c", WRITER, str(directory), state, str(seconds)]
        started.append(subprocess.Popen(command))
        await until(
            lambda: (run_state.StateFile(directory).load().status or {}).get("state") == state,
            "the run tells its state",
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


async def test_a_run_that_has_ended_is_deleted_after_its_report(
    directory: Path, run: Callable[[str, float], Awaitable[Process]]
) -> None:
    process = await run("Succeeded", 2.0)
    await LocalRuns(directory.parent).delete("job")
    assert await asyncio.to_thread(process.wait, 10) == 0, "it was not interrupted"
    assert not directory.exists()


async def test_a_run_that_goes_on_is_told_to_end_before_it_is_deleted(
    directory: Path, run: Callable[[str, float], Awaitable[Process]]
) -> None:
    process = await run("Running", 600.0)
    await LocalRuns(directory.parent).delete("job")
    assert await asyncio.to_thread(process.wait, 10) == 130
    assert not directory.exists()
