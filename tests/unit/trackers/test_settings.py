"""Which trackers a run has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.trackers.settings import trackers_of
from tests.unit.operator.world import make_job

HERE = Path("/runs/a")


@pytest.mark.parametrize(
    ("variables", "projects"),
    [
        ({}, []),
        ({"WANDB_MODE": "online"}, []),
        ({"WANDB_API_KEY": ""}, []),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, []),
        ({"WANDB_API_KEY": "k"}, ["sluice"]),
        ({"WANDB_MODE": "offline", "WANDB_PROJECT": "math"}, ["math"]),
    ],
    ids=str,
)
def test_variables_turn_wandb_on(variables: dict[str, str], projects: list[str]) -> None:
    trackers = trackers_of(make_job(), HERE, variables)
    assert [tracker.settings["project"] for tracker in trackers] == projects
    assert {tracker.name for tracker in trackers} <= {"wandb"}
    # Nobody asked for prompts and responses to leave the machine.
    assert not any(tracker.settings["sampleEverySteps"] for tracker in trackers)


def test_the_jobs_own_trackers_take_its_place() -> None:
    own: list[dict[str, Any]] = [
        {"type": "mlflow", "project": "math", "name": "first", "args": {"team": "a"}},
        {"type": "mlflow", "python": "/opt/mlflow/bin/python", "sampleEverySteps": 0},
        {"function": "tracker.py:Tracker"},
    ]
    job = make_job(telemetry={"trackers": own})
    first, second, third = trackers_of(job, HERE, {"WANDB_API_KEY": "k"})
    assert (first.name, second.name, third.name) == ("mlflow", "mlflow-2", "own")
    positions = [tracker.position for tracker in (first, second, third)]
    assert positions == ["mlflow.math", "mlflow.sluice", "own.sluice"]
    assert (first.python, second.python) == (sys.executable, "/opt/mlflow/bin/python")
    assert first.settings["name"] == "first"
    assert second.settings["name"] == job.metadata.name
    assert second.settings["sampleEverySteps"] == 0


def test_a_run_is_the_same_as_long_as_job_and_directory_are() -> None:
    job = make_job(telemetry={"trackers": [{"type": "wandb"}]})

    def identity(directory: str) -> str:
        return str(trackers_of(job, Path(directory), {})[0].settings["identity"])

    assert identity("/runs/a") == identity("/runs/a") != identity("/runs/b")
