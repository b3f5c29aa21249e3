"""The real libraries of trackers, offline or with a server of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.runtime.pod_env import free_port
from sluice.trackers.following import Follower
from sluice.trackers.settings import trackers_of
from sluice_trainer.telemetry import tracker_processes
from sluice_trainer.telemetry.tracker_processes import TrackerProcess
from tests.tools import missing
from tests.unit.operator.world import make_job
from tests.unit.trackers.run_files import add_evaluation, add_picture, add_step, make_run

PYTHON = Path(sys.prefix).parent / ".venv-trackers/bin/python"
PROJECT = "digits"


@pytest.fixture(scope="module")
def python() -> Path:
    if not PYTHON.exists():
        missing("needs the libraries of trackers: make agents")
    return PYTHON


@contextlib.contextmanager
def mlflow_server(directory: Path, python: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory}/mlflow.db"]
    command += ["--artifacts-destination", str(directory / "artifacts")]
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=directory, start_new_session=True
        )
    try:
        _wait_for(f"{url}/health")
        yield url
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def _wait_for(url: str) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < end, f"nothing answers at {url}"
            time.sleep(0.2)


def follow(run: Path, kind: str, python: Path) -> None:
    """Run a tracker until it has sent everything, as at the end of a trainer's process."""
    job = make_job(
        telemetry={"trackers": [{"type": kind, "project": PROJECT, "python": str(python)}]}
    )
    processes = [TrackerProcess(run, tracker) for tracker in trackers_of(job, run, {})]
    tracker_processes.close(processes)
    log = run / f"logs/tracker-{kind}.log"
    assert Follower(run, f"{kind}.{PROJECT}", 0).left() == 0, log.read_text()[-3000:]


def stored(kind: str, place: str, python: Path) -> dict[str, list[Any]]:
    script = Path(__file__).with_name("tracked.py")
    found = subprocess.run(
        [str(python), "-P", str(script), kind, place], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr[-3000:]
    answer: dict[str, list[Any]] = json.loads(found.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "trackio", "swanlab"])
def test_a_run_that_is_continued_is_one_run(
    kind: str, tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    add_picture(run)
    with contextlib.ExitStack() as held:
        place = str(run)
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("SWANLAB_MODE", "offline")
        if kind == "mlflow":
            place = held.enter_context(mlflow_server(tmp_path, python))
            monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
        elif kind == "trackio":
            place = str(tmp_path / "trackio")
            monkeypatch.setenv("TRACKIO_DIR", place)
        add_step(run, 1, **{"passrate/pass@4": 0.5})
        follow(run, kind, python)
        # The trainer was killed, and another one trains step 1 again.
        add_step(run, 1)
        add_step(run, 2)
        add_evaluation(run, 2, 0.75)
        follow(run, kind, python)
        found = stored(kind, place, python)
    name = "passrate/pass_4" if kind == "mlflow" else "passrate/pass@4"
    expected = [
        ["eval/digits", 2, 0.75],
        [name, 1, 0.5],
        ["rollout/raw_reward", 1, 0.25],
        ["rollout/raw_reward", 1, 0.25],
        ["rollout/raw_reward", 2, 0.5],
    ]
    assert sorted(found["metrics"]) == sorted(expected)
    assert "samples" in found["samples"]
    assert found["pictures"], "the pictures of samples"
    assert "job.json" in found["files"]
    log = (run / f"logs/tracker-{kind}.log").read_text()
    assert "no samples" not in log, log
    assert "was not sent" not in log, log
    if kind == "mlflow":
        [[title, status, params]] = found["runs"]
        assert (title, status) == (make_job().metadata.name, "FINISHED")
        assert params["trainer.steps"] == str(make_job().spec.trainer.steps)
