"""Roles that are the first process of a container: signals while they start, orphans, their end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.first_process import started_first, until

WAITS = """
import time
from sluice.telemetry import logs
logs.run_blocking("x", lambda: time.sleep(600))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["-c", WAITS],
        ["-m", "sluice_trainer.distributed.torchrun", "--nnodes", "2", "-m", "sluice_trainer"],
    ],
    ids=["any role", "torchrun"],
)
def test_it_ends_at_once(words: list[str]) -> None:
    with started_first(words) as (outer, first):
        first.terminate()
        assert outer.wait(30) == 128 + signal.SIGTERM


ORPHANS = """
import subprocess, sys, time
from pathlib import Path
from sluice.telemetry import logs

def main():
    for _ in range(20):
        subprocess.run(["sh", "-c", "sh -c 'exit 3' &"], check=True)
    Path(sys.argv[1]).touch()
    time.sleep(600)

logs.run_blocking("x", main)
"""


def test_what_its_programs_leave_behind_is_reaped(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with started_first(["-c", ORPHANS, str(done)]) as (_, first):
        until(done.exists, "orphans")
        until(lambda: len(first.children(recursive=True)) == 1, "end of the orphans")
        (role,) = first.children()
        assert role.status() != psutil.STATUS_ZOMBIE, "it is the role that is left"


def test_the_init_has_none_of_the_jobs_variables() -> None:
    with started_first(["-c", WAITS], {**os.environ, "SLUICE_TOKEN": "secret"}) as (_, first):
        (role,) = until(first.children, "role")
        until(lambda: "SLUICE_TOKEN" not in first.environ(), "init")
        assert role.environ()["SLUICE_TOKEN"] == "secret"


ENDS = """
import os, sys, time
from pathlib import Path
from sluice.telemetry import logs

def main():
    while not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    MAIN

logs.run_blocking("x", main)
"""


@pytest.mark.parametrize(
    ("main", "code"),
    [
        pytest.param("return 7", 7, id="a code"),
        pytest.param("return None", 0, id="success"),
        pytest.param("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, id="a signal"),
    ],
)
def test_the_container_ends_with_the_roles_code(main: str, code: int, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with started_first(["-c", ENDS.replace("MAIN", main), str(seen)]) as (outer, _):
        seen.touch()
        assert outer.wait(60) == code
