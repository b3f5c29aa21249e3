"""Models learn, from random weights and on the real engines: under every estimator, with tools, as
agents, from given answers, from images.

`make test-learning`. Held-out prompts are judged by exact match. Each run takes some
minutes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.telemetry import run_directory
from tests.integration.run.laptop import Laptop
from tests.learning.algorithms import RUNS

SECONDS = 1500.0
pytestmark = pytest.mark.timeout(SECONDS + 60)
# Held-out exact match before the first step, at most; and after the last, at least: no digit may be
# missing.
AT_FIRST, LEARNED = 0.05, 0.9
LESS = {
    "agent": 0.8,
    "code": 0.8,
    "search": 0.8,
    "verifiers": 0.8,
    "distillation": 0.8,
    "vision": 0.8,
    "maze": 0.7,
}
# Runs whose first exact match may be above zero, because a guess can be right: one of two among
# ten, one word among twenty-six, a walk that begins next to its end. The maze's model has learned a
# little before.
GUESSED = {"code": 0.3, "search": 0.1, "verifiers": 0.1, "gym": 0.3, "maze": 0.45}


@pytest.mark.parametrize("name", RUNS)
def test_the_model_learns(name: str, example: Callable[[str], Path], runs: Path) -> None:
    directory = runs / name
    shutil.rmtree(directory, ignore_errors=True)
    run = Laptop(example(RUNS[name].example), directory, *RUNS[name].overrides)
    try:
        assert run.run(SECONDS) == 0, run.text()[-3000:]
    finally:
        run.stop()
    summary = run.summary()
    assert summary["state"] == "Succeeded"
    assert summary["eval_first"] <= GUESSED.get(name, AT_FIRST)
    assert summary["eval_last"] >= LESS.get(name, LEARNED)
    records = run_directory.by_step(directory / run_directory.METRICS)
    if name == "sft":
        assert summary["loss_last"] < 0.1 * summary["loss_first"]
    elif name == "asynchronous":
        last = [
            record["train/train_rollout_logprob_abs_diff"]
            for record in list(records.values())[-20:]
        ]
        assert sum(last) / len(last) < 0.02, (
            "the engine's cache holds nothing of much older weights"
        )
    else:
        assert summary["logprob_diff_max"] <= 1e-4, "trainer and engine agree about the model"
    if name == "distillation":
        gaps = [record["train/opd_reverse_kl"] for record in records.values()]
        assert gaps[-1] < 0.1 * gaps[0], "the student comes close to its teacher"
        assert "rollout/raw_reward" not in records[1], "there is no reward"
    if name == "ppo":
        # In the end all returns are 1 and there is nothing to explain.
        assert max(r["critic/vf_explained_var"] for r in records.values()) > 0.3, (
            "the critic knows something"
        )
    if name in ("gspo", "cispo"):
        assert any(record["train/pg_clipfrac"] > 0 for record in records.values()), (
            "ratios differ from 1"
        )
