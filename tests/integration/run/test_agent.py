"""The example of an agent, on the real engines: its program plays every sample of a run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from sluice.telemetry import rollouts
from tests.integration.run.laptop import ROOT, Laptop


def test_an_agent_plays_as_it_is(tmp_path: Path) -> None:
    directory = tmp_path / "agent"
    ignored = shutil.ignore_patterns("*.jsonl", "model", "__pycache__")
    shutil.copytree(ROOT / "examples/agents/openai", directory, ignore=ignored)
    subprocess.run(
        [sys.executable, str(directory / "make_data.py"), str(directory)], check=True, timeout=60
    )
    settings = ("trainer.steps=3", "evaluation=null", "debug.dumpRollouts=true")
    run = Laptop(directory, tmp_path / "run", *settings)
    assert run.run() == 0, run.text()[-3000:]
    samples = [
        sample
        for path in rollouts.steps(run.directory / "rollouts").values()
        for group in rollouts.read(path)
        for sample in group.samples
    ]
    assert len(samples) == 3 * 32 * 8
    assert {sample.error for sample in samples} == {""}
    answered = [sample for sample in samples if len(sample.metadata["turns"]) == 3]
    assert answered, "two words in thirty are calls"
    for sample in answered:
        called, tool, said = (turn["length"] for turn in sample.metadata["turns"])
        # The end of the turn, the tool's digit and the mark behind it are the environment's.
        assert tool == 3
        assert sample.loss_mask.tolist() == [1] * called + [0] * tool + [1] * said
    for record in run.steps().values():
        assert record["train/train_rollout_logprob_abs_diff_max"] < 1e-4
