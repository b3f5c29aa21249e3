"""`sluice list` and `sluice status`: runs of this machine and jobs of a cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sluice.api import load_job
from sluice_client.job_list import cluster_job
from sluice_operator.cluster.local import run_state
from tests.unit.cli.conftest import Sluice, prepare

STATUS = {
    "state": "Running",
    "step": 3,
    "totalSteps": 20,
    "reward": "0.5",
    "restarts": 1,
    "startTime": "2026-01-31T15:00:00Z",  # after it was stopped
}


@pytest.fixture
def runs(task: Path, tmp_path: Path, no_cluster: None) -> Path:
    """Directory runs/ with the run `first`, which was stopped at step 3; there is no cluster."""
    first = tmp_path / "runs/first"
    prepare(first, load_job(task / "job.yaml"), fresh=False)
    document = json.loads((first / "job.json").read_text())
    document["metadata"]["creationTimestamp"] = "2026-01-31T11:44:00Z"
    (first / "job.json").write_text(json.dumps(document))
    run_state.StateFile(first).save(run_state.State(job="default/digits", status=STATUS))
    return tmp_path / "runs"


def test_runs_are_listed(runs: Path, sluice: Sluice) -> None:
    result = sluice("list")
    assert result.exit_code == 0, result.output
    head, line = result.output.splitlines()
    assert head.split() == ["name", "where", "state", "step", "reward", "restarts", "started"]
    assert line.split() == [
        "digits",
        "runs/first",
        "Stopped",
        "3/20",
        "0.5",
        "1",
        "2026-01-31T11:44:00Z",
    ]


def test_a_stopped_run_keeps_its_start_time(runs: Path, sluice: Sluice) -> None:
    stopped = run_state.State(job="default/digits", status={"state": "Suspended", "step": 3})
    run_state.StateFile(runs / "first").save(stopped)
    job = json.loads((runs / "first/job.json").read_text())
    [run] = json.loads(sluice("list", "-o", "json").stdout)
    assert run["started"] == job["metadata"]["creationTimestamp"]
    prepare(runs / "first", load_job(runs.parent / "digits/job.yaml"), fresh=False)
    assert json.loads((runs / "first/job.json").read_text()) == job, "it goes on"


def test_the_error_for_a_missing_run_names_the_existing_runs(runs: Path, sluice: Sluice) -> None:
    result = sluice("status", "frist")
    assert result.exit_code == 1
    assert "error: there is no run in runs/frist (runs: first), and no API server" in (
        result.stderr
    )


async def test_an_active_run_is_locked(runs: Path, sluice: Sluice) -> None:
    held = await run_state.lock(runs / "first", 0)
    try:
        assert run_state.is_locked(runs / "first")
    finally:
        os.close(held)
    assert not run_state.is_locked(runs / "first")


def test_list_as_json(runs: Path, sluice: Sluice) -> None:
    (runs / "broken").mkdir()
    (runs / "broken/job.json").write_text("{")
    nothing = {"step": None, "totalSteps": None, "reward": None, "restarts": 0, "started": None}
    assert json.loads(sluice("list", "-o", "json").stdout) == [
        {
            "name": "digits",
            "where": "runs/first",
            "state": "Stopped",
            "step": 3,
            "totalSteps": 20,
            "reward": "0.5",
            "restarts": 1,
            "started": "2026-01-31T11:44:00Z",
        },
        {"name": "broken", "where": "runs/broken", "state": "Unreadable", **nothing},
    ]


def test_a_job_of_a_cluster_has_the_same_fields_as_a_run() -> None:
    stored = {"metadata": {"name": "gsm8k", "namespace": "team"}, "status": STATUS}
    listed = cluster_job(stored).facts()
    assert (listed["where"], listed["state"], listed["totalSteps"]) == (
        "team/gsm8k",
        "Running",
        20,
    )


@pytest.mark.usefixtures("no_cluster")
def test_an_empty_list_says_so(sluice: Sluice) -> None:
    assert sluice("list").output == "no runs in runs/ and no jobs in a cluster\n"
    result = sluice("list", "-n", "team")
    assert result.exit_code == 1
    assert "error: no API server is known" in result.output


def test_status_as_json(runs: Path, sluice: Sluice) -> None:
    result = sluice("status", "first", "-o", "json")
    assert result.exit_code == 0, result.output
    status = json.loads(result.stdout)
    assert list(status) == ["where", "job", "pods", "events", "notes"]
    assert status["job"]["kind"] == "RLJob"
    assert status["job"]["status"]["step"] == 3
    assert status["where"] == "run directory runs/first"


@pytest.mark.usefixtures("no_cluster")
def test_a_missing_job_is_reported_for_runs_and_the_cluster(sluice: Sluice) -> None:
    result = sluice("status", "mine")
    assert result.exit_code == 1
    assert "error: there is no run in runs/mine, and no API server is known" in result.output
    assert "Config not found" not in result.output
