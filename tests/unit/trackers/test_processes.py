"""A tracker's process: it follows, is started again, and never holds up the trainer."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sluice.trackers.following import Follower
from sluice.trackers.settings import TrackerSettings, trackers_of
from sluice_trainer.telemetry import tracker_processes
from sluice_trainer.telemetry.tracker_processes import TrackerProcess
from tests.unit.operator.world import make_job
from tests.unit.trackers.run_files import add_evaluation, add_step, make_run

OWN = """
import json, os, pathlib, time

class Tracker:
    def __init__(self, run):
        self.file = run.directory / "sent.jsonl"
        self.write(start=[run.project, run.name, run.args, os.getpid(), sorted(run.config)])

    def write(self, **record):
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\\n")

    def log(self, metrics, step):
        if step == 3 and not pathlib.Path(self.file.parent, "server").exists():
            raise ConnectionError("the server is away")
        self.write(step=step, metrics=metrics)
        if step == 99:
            time.sleep(600)

    def log_samples(self, name, rows, step):
        self.write(samples=name, rows=len(rows), step=step)
        raise TypeError("no such table")
"""
# Starting Python takes a while on a busy machine.
SECONDS = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "tracker.py").write_text(OWN)
    return make_run(tmp_path)


def settings_of(run: Path) -> TrackerSettings:
    own = {"function": f"{run}/tracker.py:Tracker", "project": "p", "args": {"a": 1}}
    return trackers_of(make_job(telemetry={"trackers": [own]}), run, {})[0]


def sent(run: Path) -> list[dict[str, object]]:
    file = run / "sent.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps(run: Path) -> list[object]:
    return [record["step"] for record in sent(run) if "metrics" in record]


def until(condition: Callable[[], bool], process: TrackerProcess | None = None) -> None:
    """Wait until the condition holds, and watch the process as the trainer does at each step."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.05)
        if process:
            process.watch()


def test_records_arrive_while_the_run_goes_on_and_at_its_end(run: Path) -> None:
    process = TrackerProcess(run, settings_of(run))
    add_step(run, 1)
    until(lambda: steps(run) == [1])
    add_step(run, 2)
    add_evaluation(run, 2, 0.5)
    tracker_processes.close([process])
    first, *records = sent(run)
    assert first["start"][:3] == ["p", make_job().metadata.name, {"a": 1}]  # type: ignore[index]
    assert records == [
        {"step": 1, "metrics": {"rollout/raw_reward": 0.25}},
        {"samples": "samples", "rows": 2, "step": 1},
        {"step": 2, "metrics": {"rollout/raw_reward": 0.5}},
        {"step": 2, "metrics": {"eval/digits": 0.5}},
        {"samples": "samples/eval/digits", "rows": 2, "step": 2},
    ], "samples that the tracker refuses do not stop it"
    assert "no samples of step 1: TypeError: no such table" in (
        (run / "logs/tracker-own.log").read_text()
    )


def test_a_killed_tracker_goes_on_where_it_was(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_processes, "_PAUSE_SECONDS", 0.0)
    process = TrackerProcess(run, settings_of(run))
    add_step(run, 1)
    until(lambda: Follower(run, settings_of(run).position, 0).left() == 0)
    os.kill(sent(run)[0]["start"][3], signal.SIGKILL)  # type: ignore[index]
    add_step(run, 2)
    with capture_logs() as logs:
        until(lambda: steps(run) == [1, 2], process)
    assert [log["event"].split(":")[0] for log in logs] == ["tracker own ended"]
    tracker_processes.close([process])


def test_a_failure_is_told_with_its_reason_and_what_to_do(run: Path) -> None:
    process = TrackerProcess(run, settings_of(run))
    for step in (1, 2, 3, 4):
        add_step(run, step)
    with capture_logs() as logs:
        until(lambda: bool(logs), process)
        tracker_processes.close([process])
    assert [log["reason"] for log in logs] == ["ConnectionError: the server is away"] * 2
    assert f"2 records were not sent; `sluice track {run}` sends them" in logs[1]["event"]
    assert steps(run) == [1, 2]


def test_a_tracker_that_hangs_is_ended(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = TrackerProcess(run, settings_of(run))
    add_step(run, 99)
    until(lambda: steps(run) == [99])
    process.finish()
    with capture_logs() as logs:
        process.wait(0.0)
    assert "1 records were not sent" in logs[0]["event"]


def test_an_interpreter_that_is_not_there_is_told_once_more_at_the_end(run: Path) -> None:
    settings = settings_of(run)
    add_step(run, 1)
    with capture_logs() as logs:
        process = TrackerProcess(run, replace(settings, python="/no/python"))
        process.watch()
        tracker_processes.close([process])
    assert "tracker own cannot start" in logs[0]["event"]
    assert "1 records were not sent" in logs[-1]["event"]


def test_a_library_that_is_not_installed_is_named(run: Path) -> None:
    settings = settings_of(run).settings | {"type": "trackio", "function": None}
    add_step(run, 1)
    with capture_logs() as logs:
        tracker_processes.close(
            [TrackerProcess(run, TrackerSettings("trackio", "trackio.p", sys.executable, settings))]
        )
    assert "trackio is not installed for " in logs[0]["reason"]
    assert "telemetry.trackers[].python" in logs[0]["reason"]
