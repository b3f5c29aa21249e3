"""Every estimator teaches the quickstart's model, from random weights and on the real engines. `make test-learning`.

The model is shown no answer; held-out prompts are judged by exact match. Each run takes what `make quickstart` takes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sluice.telemetry import run_directory
from tests.integration.run.laptop import Laptop
from tests.learning.algorithms import ALGORITHMS

SECONDS = 1500.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]
AT_FIRST, LEARNED = 0.05, 0.8
"""Held-out exact match before the first step, at most; and after the last, at least."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_model_learns(name: str, example: Path, runs: Path) -> None:
    directory = runs / name
    shutil.rmtree(directory, ignore_errors=True)
    run = Laptop(example, directory, *ALGORITHMS[name])
    try:
        assert run.run(SECONDS) == 0, run.text()[-3000:]
    finally:
        run.stop()
    summary = run.summary()
    assert summary["state"] == "Succeeded"
    assert summary["eval_first"] <= AT_FIRST
    assert summary["eval_last"] >= LEARNED
    assert summary["logprob_diff_max"] <= 1e-4, "trainer and engine agree about the model"
    records = run_directory.by_step(directory / run_directory.METRICS)
    if name == "ppo":
        # In the end all returns are 1 and there is nothing to explain.
        assert max(r["critic/vf_explained_var"] for r in records.values()) > 0.3, "the critic knows something"
    if name in ("gspo", "cispo"):
        assert any(record["train/pg_clipfrac"] > 0 for record in records.values()), "ratios differ from 1"
