"""Two jobs learn different tasks with the same prompts, at once and on one engine of a pool.

An answer with the adapter of the other job, or from its prefix cache, would be wrong.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.run.laptop import ROOT, Laptop
from tests.integration.run.pool_process import NAME, PoolProcess

SECONDS = 900.0
pytestmark = pytest.mark.timeout(2 * SECONDS)
# Held-out prompts that are answered exactly, at least, after the last step. The answers of the
# other task are right for two of five.
LEARNED = 0.8


@pytest.fixture
def lora(example: Callable[[str], Path]) -> Path:
    """A copy of the example next to the quickstart, whose rows it reads."""
    quickstart = example("quickstart")
    directory = quickstart.with_name("lora")
    shutil.copytree(ROOT / "examples/lora", directory, dirs_exist_ok=True)
    shutil.copy(directory / "pool-job.yaml", directory / "job.yaml")
    return directory


@pytest.fixture
def base(example: Callable[[str], Path], runs: Path) -> Path:
    """A model that has learned a little: twenty steps of the quickstart."""
    directory = runs / "pool-base"
    shutil.rmtree(directory, ignore_errors=True)
    run = Laptop(example("quickstart"), directory, "trainer.steps=20")
    try:
        assert run.run(SECONDS) == 0, run.text()[-3000:]
    finally:
        run.stop()
    return directory / "checkpoints/hf"


def test_two_jobs_learn_opposite_tasks_on_one_engine(
    base: Path, lora: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = f"model.path={base}"
    pool = PoolProcess(lora / "pool-cpu.yaml", tmp_path / "pool.out", model)
    jobs = {
        "pool-largest": (),
        "pool-first": (
            "metadata.name=first",
            "trainer.steps=90",
            "reward.function=pool_rewards.py:first",
            "evaluation.datasets[0].reward.function=pool_rewards.py:first_exactly",
        ),
    }
    started: dict[str, Laptop] = {}
    try:
        pool.until(f"pool {NAME} is ready")
        for name, overrides in jobs.items():
            shutil.rmtree(runs / name, ignore_errors=True)
            started[name] = Laptop(lora, runs / name, model, *overrides)
            started[name].start()
        for name, run in started.items():
            assert run.wait(SECONDS) == 0, run.text()[-3000:]
            summary = run.summary()
            assert summary["eval_last"] >= LEARNED, name
            assert summary["logprob_diff_max"] <= 1e-4, "trainer and engine agree about the model"
    finally:
        for run in started.values():
            run.stop()
        pool.stop()
