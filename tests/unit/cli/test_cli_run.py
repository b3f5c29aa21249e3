"""`sluice run`: options, and jobs that cannot start on this machine."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from sluice.api import ManifestError, load_job
from sluice_cli.init.tiny_model import write_model
from sluice_cli.run.ending import result_line
from sluice_cli.run.start_from import model_of
from sluice_operator.cluster.local import run_state
from tests.unit.cli.conftest import Sluice, prepare


@pytest.mark.parametrize(
    ("place", "message"),
    [("file", "Not a directory"), ("/proc/no/run", "No such file or directory")],
    ids=["below a file", "below /proc"],
)
def test_a_run_directory_that_cannot_be_made_is_a_one_line_error(
    sluice: Sluice, job_file: Path, place: str, message: str
) -> None:
    (job_file.parent / "file").touch()
    result = sluice("run", job_file, "--run-dir", job_file.parent / place)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "--run-dir" in result.output


def test_a_job_that_needs_more_gpus_than_the_machine_has_does_not_start(
    sluice: Sluice, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    changes = ["--set", "trainer.gpusPerNode=1", "--set", "rollout.gpusPerReplica=1"]
    result = sluice("run", job_file, "--run-dir", tmp_path / "run", *changes)
    assert (result.exit_code, (tmp_path / "run").exists()) == (2, False)
    assert "need 2 GPU(s), and this machine shows 1" in result.output


def test_a_job_whose_engine_is_not_installed_does_not_start(
    sluice: Sluice, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_VLLM_PYTHON", str(tmp_path / "python"))
    words = ["run", job_file, "--run-dir", tmp_path / "run", "--set", "rollout.engine=vllm"]
    result = sluice(*words)
    assert (result.exit_code, (tmp_path / "run").exists()) == (2, False)
    sentence = f"needs vLLM at {tmp_path / 'python'}: run `make vllm`, or set SLUICE_VLLM_PYTHON"
    assert sentence in " ".join(result.output.split())


@pytest.mark.parametrize("changes", [["--fresh"], ["--set", "trainer.steps=999"]], ids=str)
async def test_a_refused_start_does_not_change_the_active_run(
    sluice: Sluice,
    job_file: Path,
    tmp_path: Path,
    changes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice_client.run_dir.LOCK_SECONDS", 0.1)
    monkeypatch.setattr("sluice_cli.run.command.check_engine", lambda _: None)
    directory = tmp_path / "run"
    await asyncio.to_thread(prepare, directory, load_job(job_file), fresh=False)
    # The run succeeded once, was made longer, and goes on.
    run_state.StateFile(directory).save(run_state.State(status={"state": "Running"}))
    (directory / "summary.json").write_text('{"state": "Succeeded"}')
    held = await run_state.lock(directory, 0)
    before = {path.name: path.read_text() for path in directory.iterdir()}
    command = ["run", job_file, "--run-dir", directory, *changes]
    try:
        result = await asyncio.to_thread(sluice, *command)
    finally:
        os.close(held)
    assert result.exit_code == 2, result.output
    assert f"is in use by process {os.getpid()}" in result.output
    assert "already succeeded" not in result.output
    assert {path.name: path.read_text() for path in directory.iterdir()} == before


def test_a_full_disk_is_a_one_line_error(
    sluice: Sluice, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sluice_cli.run.command._run", full)
    result = sluice("run", job_file, "--run-dir", tmp_path / "run")
    assert result.exit_code == 2
    message = "the run cannot go on: [Errno 28] No space left on device; once this is fixed, the"
    assert message in result.output


def test_a_run_starts_from_the_model_of_another_run(job_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "first"
    prepare(other, load_job(job_file), fresh=False)
    with pytest.raises(ManifestError, match="the run has no model and no checkpoint yet"):
        model_of(other)
    write_model(other / "checkpoints/hf", (), unit="bytes", context=2048)
    spec = load_job(job_file, model_of(other)).spec
    assert (spec.model.path, spec.model.init) == (str(other / "checkpoints/hf"), "pretrained")
    with pytest.raises(ManifestError, match=r"--from nowhere: runs/nowhere has no job\.json"):
        model_of(Path("nowhere"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--rollout-only", "--set", "model.init=pretrained"],
            ["model.init=pretrained", "debug.rolloutOnly=true"],
        ),
        (
            ["--set", "trainer.steps=2", "--train-from", "dump"],
            ["trainer.steps=2", "debug.replay={here}/dump", "rollout.replicas=0"],
        ),
    ],
    ids=str,
)
def test_options_for_half_of_the_loop_set_fields_of_the_manifest(
    sluice: Sluice,
    job_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    expected: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = []

    def run_local(path: Path, overrides: list[str], run_dir: Path | None, **_: bool) -> int:
        changes.extend(overrides)
        return 0

    monkeypatch.setattr("sluice_cli.run.command.run_local", run_local)
    assert sluice("run", job_file, *options).exit_code == 0
    assert changes == [change.format(here=tmp_path) for change in expected]
    load_job(job_file, changes)


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        pytest.param({"steps": 0}, "Failed after 1:05", id="before the first step"),
        pytest.param(
            {"steps": 20, "reward_first": 0.1, "reward_last": 0.9},
            "Failed after 1:05: 20 steps, reward 0.100 -> 0.900, 1 restart",
            id="reward",
        ),
        pytest.param(
            {"steps": 1, "loss_first": 2, "loss_last": 2, "eval_first": 0.5, "eval_last": 0.75},
            "Failed after 1:05: 1 step, loss 2.000 -> 2.000, eval 0.500 -> 0.750, 1 restart",
            id="given answers",
        ),
    ],
)
def test_the_result_of_a_run_is_one_line(summary: dict[str, Any], line: str) -> None:
    names = ("reward_first", "reward_last", "loss_first", "loss_last", "eval_first", "eval_last")
    facts = dict.fromkeys(names) | {"wall_seconds": 65.0, "restarts": 1}
    assert result_line("Failed", facts | summary) == line
