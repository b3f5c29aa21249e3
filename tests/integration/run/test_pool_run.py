"""Jobs that share the engines of a pool: they train at once, and neither sees the other's adapter.

A job that is killed does not disturb the others, and all go on after an engine has died.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice_operator.cluster.local import pools
from sluice_operator.cluster.local.services import TARGETS_FILE
from tests.integration.run.laptop import Laptop, processes_of, values
from tests.integration.run.pool_process import NAME, PoolProcess, write_manifest

pytestmark = pytest.mark.timeout(900)

RANK = 4
# Trainer and engine agree about the log-probs of samples, which they would not with the adapter of
# another job.
AGREEMENT = 1e-4


@pytest.fixture
def pool(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PoolProcess]:
    """A pool with one engine, which answers."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    process = PoolProcess(write_manifest(tmp_path / "pool.yaml", pretrained), tmp_path / "pool.out")
    try:
        process.until(f"pool {NAME} is ready")
        yield process
    finally:
        process.stop()


@pytest.fixture
def job(pretrained: Path, laptop: Callable[..., Laptop]) -> Callable[..., Laptop]:
    def make(name: str, seed: int, *overrides: str) -> Laptop:
        return laptop(
            f"metadata.name={name}",
            f"data.seed={seed}",
            f"model={{path: {pretrained}, init: pretrained}}",
            f"rollout.pool={NAME}",
            "weightSync={lora: adapter, pauseMode: versions}",
            "trainer.backend=fsdp",
            f"trainer.lora={{rank: {RANK}, alpha: 8}}",
            "trainer.optimizer.lr=0.02",
            "rollout.batchSize=8",
            "checkpoint.everySteps=2",
            *overrides,
            name=name,
        )

    return make


def sluice(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sluice_cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def check(run: Laptop, steps: int) -> None:
    """Check that a run has trained all steps with its own adapter."""
    summary = run.summary()
    assert (summary["state"], summary["steps"]) == ("Succeeded", steps)
    records = list(run.steps().values())
    assert max(values(records, "train/train_rollout_logprob_abs_diff_max")) <= AGREEMENT


def test_two_jobs_share_an_engine_although_one_of_them_and_the_engine_are_killed(
    pool: PoolProcess, job: Callable[..., Laptop], tmp_path: Path
) -> None:
    first, second = job("first", 1, "trainer.steps=30"), job("second", 2, "trainer.steps=14")
    first.start()
    second.start()
    for run in (first, second):
        run.until_step(3)

    targets = json.loads((first.directory / TARGETS_FILE).read_text())
    assert all("metrics_path" not in target["labels"] for target in targets), (
        "the engine has the metrics of both jobs"
    )

    second.kill("run")
    first.until_step(first.step() + 3)
    second.start()
    second.until_step(6)
    assert "GangRestarting" not in first.text(), "the other job was not disturbed"

    pool.kill_engine()
    pool.until("engine 0 has ended, and starts again in 2 s: engine: killed by SIGKILL", 30)
    pool.until("engine 0 answers", times=2)
    assert second.wait(300) == 0, second.text()[-3000:]
    assert first.wait(300) == 0, first.text()[-3000:]
    check(first, 30)
    check(second, 14)

    assert sluice("pool", "list").stdout.startswith(f"{NAME}: ")
    assert pool.stop() == 0, pool.text()
    assert not processes_of(tmp_path / "state")
    assert pools.running() == []


@pytest.mark.long
def test_a_job_goes_on_after_the_pool_was_killed_and_started_again(
    pool: PoolProcess, job: Callable[..., Laptop], tmp_path: Path
) -> None:
    run = job("first", 1, "trainer.steps=500")
    run.start()
    run.until_step(2)
    namesake = job("other", 2, "metadata.name=first")
    assert namesake.run(60) == 2
    assert f"another run of the job default/first uses the pool {NAME}" in namesake.text()
    again = sluice("pool", "up", str(tmp_path / "pool.yaml"))
    assert again.returncode == 2
    assert f"error: pool {NAME} runs already" in again.stderr

    pool.stop(signal.SIGKILL)
    run.until(lambda: f"no pool {NAME} runs on this machine" in run.text(), "word of it", 60)
    second = PoolProcess(tmp_path / "pool.yaml", tmp_path / "second.out")
    try:
        second.until(f"pool {NAME} is ready")
        run.until_step(run.step() + 3)
        assert sluice("pool", "down", NAME).stdout == f"pool {NAME} has ended\n"
        assert second.process.wait(10) == 0
    finally:
        second.stop()


def test_an_engine_that_refuses_its_arguments_ends_the_pool(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = write_manifest(tmp_path / "pool.yaml", pretrained)
    result = sluice("pool", "up", str(file), "--set", "engineArgs={no-such-argument: 1}")
    assert result.returncode == 1, result.stdout
    assert "error: engine 0: engine: " in result.stderr
    assert "no-such-argument" in result.stderr
    assert pools.running() == []
