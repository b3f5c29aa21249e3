"""The output of `sluice run`: the panel on a terminal, and plain lines."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from sluice.api import RLJobStatus, load_job
from sluice.telemetry import run_directory
from sluice.wire.v1 import buffer_pb2, rendezvous_pb2
from sluice_cli.run.monitor import ServiceSnapshot
from sluice_cli.run.run_files import RunFiles
from sluice_cli.run.view import (
    LiveView,
    PlainView,
    numbers,
    progress,
    roles,
    sample_text,
    sparkline,
)


def drawn(part: RenderableType) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=120, color_system=None).print(part)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def write_step(directory: Path, step: int, seconds: float, **more: Any) -> None:
    record = {
        "step": step,
        "rollout/raw_reward": step / 10,
        "perf/step_time": seconds,
        "perf/tokens_per_second": 1234.0,
    }
    run_directory.append(directory / run_directory.METRICS, record | more)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    for step in range(1, 6):
        write_step(tmp_path, step, 2.0)
    files = RunFiles(tmp_path)
    files.read()
    return files


def at(step: int, total: int = 100, **more: Any) -> ServiceSnapshot:
    return ServiceSnapshot(stats=buffer_pb2.BufferStats(step=step, total_steps=total, **more))


def test_the_time_left_follows_from_the_step_times(files: RunFiles) -> None:
    assert files.seconds_left(5, 100) == 190.0
    assert "0:10 elapsed, 3:10 left" in drawn(progress(at(5), files, elapsed=10.0))[0]


def test_a_restart_does_not_change_the_time_left(files: RunFiles, tmp_path: Path) -> None:
    write_step(tmp_path, 6, 600.0)
    files.read()
    assert files.seconds_left(6, 100) == 188.0
    assert "11:00 elapsed, 3:08 left" in drawn(progress(at(6), files, elapsed=660.0))[0]


def test_the_time_left_is_unknown_before_the_first_step(tmp_path: Path) -> None:
    assert "step 0 of 100" in drawn(progress(at(0), RunFiles(tmp_path), elapsed=1.0))[0]
    assert "0:01 elapsed, ? left" in drawn(progress(at(0), RunFiles(tmp_path), elapsed=1.0))[0]


def test_the_panel_shows_evaluations_and_response_lengths(files: RunFiles, tmp_path: Path) -> None:
    for version, value in ((0, 0.0), (10, 0.5), (20, 1.0)):
        for name in ("one", "two"):
            record = {"version": version, "dataset": name, f"eval/{name}": value}
            run_directory.append(tmp_path / run_directory.EVALUATION, record)
    length = {"rollout/response_len/mean": 812.4, "rollout/response_len/max": 2048}
    write_step(tmp_path, 6, 2.0, **length, **{"rollout/truncated_ratio": 0.125})
    files.read()
    lines = "\n".join(drawn(numbers(at(6, evaluation={"eval/one": 1.0}), files)))
    assert files.evaluations() == [0.0, 0.5, 1.0]
    assert "evaluation 1.000 ▁▅█" in lines
    assert "responses 812 tokens, longest 2,048, 12% cut off" in lines


def test_a_sample_of_the_newest_step_is_shown(files: RunFiles, tmp_path: Path) -> None:
    assert files.sample() is None, "it is not written yet"
    rows = [{"prompt": "max 1 2 3 =", "response": "3", "label": "3", "reward": 1.0}]
    write_step(tmp_path, 6, 2.0)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_0000006.jsonl").write_text(json.dumps(rows[0]) + "\n")
    files.read()
    assert files.sample() == rows[0]
    assert drawn(sample_text(rows[0])) == ["sample max 1 2 3 = > 3  reward 1"]


@pytest.mark.parametrize(
    ("sample", "line"),
    [
        (
            {"prompt": "p" * 80, "response": "a\nb " + "r" * 80, "reward": None},
            f"sample ...{'p' * 60} > a b {'r' * 56}...",
        ),
        (
            {"prompt": [{"role": "user", "content": "How many?"}], "response": "[bold]3"},
            "sample How many? > [bold]3",
        ),
    ],
    ids=["long", "messages"],
)
def test_a_sample_takes_one_line(sample: dict[str, Any], line: str) -> None:
    text = io.StringIO()
    Console(file=text, width=200, color_system=None).print(sample_text(sample))
    assert text.getvalue().strip() == line


def status(state: str, ready: int, **more: Any) -> RLJobStatus:
    names = ("rendezvous", "buffer", "rollout", "trainer")
    role_counts = [{"name": name, "desired": 1, "ready": ready, "attempt": 1} for name in names]
    return RLJobStatus.model_validate({"state": state, "roles": role_counts} | more)


FAILURE = {"role": "trainer", "pod": "x-trainer-0-1-0", "time": "2026-01-31T12:00:00Z"}


@pytest.mark.parametrize(
    ("status", "doing"),
    [
        pytest.param(
            status("Running", 1), ["serving", "training", "starting", "training"], id="running"
        ),
        pytest.param(
            status("Succeeded", 1), ["ending", "ending", "ending", "ending"], id="pods still end"
        ),
        pytest.param(status("Succeeded", 0), ["ended", "ended", "ended", "ended"], id="succeeded"),
        pytest.param(
            status("Failed", 0, lastFailure=FAILURE),
            ["ended", "ended", "ended", "failed"],
            id="the trainer failed",
        ),
        pytest.param(status("Suspended", 0), ["ended", "ended", "ended", "ended"], id="stopped"),
    ],
)
def test_roles_of_an_ended_job(status: RLJobStatus, doing: list[str]) -> None:
    members = {"buffer-0": "training", "trainer-0": "training"}
    entries = [
        rendezvous_pb2.LedgerEntry(
            member=rendezvous_pb2.Member(name=name, role=name[:-2]), state=state
        )
        for name, state in members.items()
    ]
    snapshot = ServiceSnapshot(ledger=rendezvous_pb2.Ledger(entries=entries))
    lines = drawn(roles(status, snapshot))[1:]
    assert [line.split()[-1] for line in lines] == doing


def test_the_panel_names_the_run(task: Path, files: RunFiles, tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=True, color_system=None)
    view = LiveView(console, load_job(task / "job.yaml"), tmp_path)
    view.event("Normal", "Started: pods are running\nand more")
    view.show(status("Running", 1), at(5), files, [])
    view.close()
    panel = text.getvalue()
    assert "digits  Running" in panel
    assert str(tmp_path) in panel
    assert "Started: pods are running" in panel


def waits(state: str, message: str) -> RLJobStatus:
    running = {
        "type": "Running",
        "status": "False",
        "reason": state,
        "message": message,
        "lastTransitionTime": "2026-01-31T12:00:00Z",
    }
    return RLJobStatus.model_validate({"state": state, "conditions": [running]})


def test_a_starting_job_prints_each_reason_to_wait_once(tmp_path: Path) -> None:
    text = io.StringIO()
    view = PlainView(Console(file=text, width=120, color_system=None))
    for state, message in (
        ("Pending", "0 of 900 pods are running"),
        ("Pending", "1 of 900 pods are running"),  # not a line for each pod
        ("Starting", "pods are running; waiting for trainer-0"),
        ("Starting", "pods are running; waiting for trainer-0"),
        ("Starting", "pods are running; no engine has started yet"),
        ("Running", "training, with 900 of 900 pods running"),
        ("Running", "training, with 899 of 900 pods running"),
    ):
        view.show(waits(state, message), ServiceSnapshot(), RunFiles(tmp_path), [])
    assert [line.split(" ", 1)[1] for line in text.getvalue().splitlines()] == [
        "state Pending: 0 of 900 pods are running",
        "state Starting: pods are running; waiting for trainer-0",
        "state Starting: pods are running; no engine has started yet",
        "state Running",
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], ""), ([1.0], ""), ([0.0, 1.0], "▁█"), ([2.0, 2.0], "▁▁"), ([0.0, 0.5, 1.0], "▁▅█")],
    ids=str,
)
def test_a_sparkline_scales_from_the_lowest_to_the_highest_value(
    values: list[float], expected: str
) -> None:
    assert sparkline(values) == expected


def test_a_long_sparkline_keeps_its_width() -> None:
    assert len(sparkline([float(i) for i in range(1000)], width=40)) == 40
