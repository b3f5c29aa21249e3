"""`sluice track` sends a run to its trackers, and to others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice_cli.main import app
from tests.unit.trackers.run_files import add_step, make_run

OWN = """
class Tracker:
    def __init__(self, run):
        self.file = run.directory / "sent"

    def log(self, metrics, step):
        if metrics.get("loss") == 7:
            raise ConnectionError("the server is away")
        with self.file.open("a") as file:
            file.write(f"{step} ")
"""


def run_of(directory: Path) -> Path:
    (directory / "tracker.py").write_text(OWN)
    return make_run(directory, trackers=[{"function": f"{directory}/tracker.py:Tracker"}])


def test_what_is_new_is_sent_once(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for step in (1, 2):
        add_step(run, step)
    result = CliRunner().invoke(app, ["track", str(run)])
    assert (result.exit_code, result.output) == (0, "own: 2 records sent\n")
    assert (run / "sent").read_text() == "1 2 "
    assert CliRunner().invoke(app, ["track", str(run)]).output == "own: nothing new\n"


def test_another_project_gets_the_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make_run(tmp_path)
    add_step(run, 1)
    for project in ("a", "b.c"):
        command = ["track", str(run), "--to", "wandb", "--project", project]
        assert CliRunner().invoke(app, command).output == "wandb: 1 records sent\n"
        assert CliRunner().invoke(app, command).output == "wandb: nothing new\n"
    assert len([*run.glob("wandb/offline-run-*")]) == 2


def test_what_cannot_be_sent_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    add_step(run, 1)
    add_step(run, 2, loss=7)
    result = CliRunner().invoke(app, ["track", str(run)])
    assert result.exit_code == 1
    assert "own: 1 records sent, 1 not" in result.output


def test_a_run_without_trackers_needs_a_name(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    result = CliRunner().invoke(app, ["track", str(run)])
    assert result.exit_code == 2
    assert "name one, such as --to wandb" in result.output


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["track", str(tmp_path)])
    assert result.exit_code == 2
    assert "has no job.json; expected the directory of a run" in result.output


def test_a_manifest_that_is_damaged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"spec": 1}))
    result = CliRunner().invoke(app, ["track", str(tmp_path)])
    assert result.exit_code == 2
    assert "job.json" in result.output
