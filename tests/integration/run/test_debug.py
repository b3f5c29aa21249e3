"""Half of the loop: training on dumped rollouts, and rollouts without training. Also tools."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.telemetry import rollouts
from tests.integration.run.laptop import ROOT, Laptop, processes_of

pytestmark = pytest.mark.timeout(900)
Make = Callable[..., Laptop]
SMALL = ("rollout.batchSize=16", "checkpoint.everySteps=3", "evaluation=null", "trainer.steps=4")


def sound(run: Laptop) -> dict[str, object]:
    summary = run.summary()
    assert summary["state"] == "Succeeded", run.text()[-2000:]
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
    assert processes_of(run.directory) == []
    return summary


@pytest.mark.long
def test_dumped_rollouts_train_the_same_model_again_and_engines_go_without_a_trainer(
    laptop: Make,
) -> None:
    first = laptop(*SMALL, "debug.dumpRollouts=true", name="first")
    assert first.run() == 0, first.text()[-3000:]
    sound(first)
    dumped = rollouts.steps(first.directory / "rollouts")
    assert list(dumped) == [1, 2, 3, 4]
    assert {len(group.samples) for group in rollouts.read(dumped[4])} == {8}

    again = laptop(
        *SMALL, f"debug.replay={first.directory}/rollouts", "rollout.replicas=0", name="again"
    )
    assert again.run() == 0, again.text()[-3000:]
    sound(again)
    assert not list((again.directory / "logs").glob("*engine*"))
    assert list(first.steps()) == list(again.steps()) == [1, 2, 3, 4]
    for step, record in first.steps().items():
        same = {n: v for n, v in record.items() if n.startswith(("train/", "rollout/"))}
        assert {n: again.steps()[step][n] for n in same} == same

    weights = first.directory / "checkpoints/hf"
    only = laptop(
        *SMALL,
        f"model.path={weights}",
        "model.init=pretrained",
        "debug.rolloutOnly=true",
        "debug.dumpRollouts=true",
        name="only",
    )
    assert only.run() == 0, only.text()[-3000:]
    sound(only)
    assert "train/loss" not in only.steps()[1]
    assert 0 <= only.steps()[4]["rollout/raw_reward"] <= 1
    versions = [{s.weight_versions[0].version for s in rollouts.read(path)[0].samples} for path in
                rollouts.steps(only.directory / "rollouts").values()]  # fmt: skip
    assert versions == [{0}, {1}, {2}, {3}]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    directory = tmp_path / "tools"
    shutil.copytree(
        ROOT / "examples/tools",
        directory,
        ignore=shutil.ignore_patterns("*.jsonl", "model", "__pycache__"),
    )
    subprocess.run(
        [sys.executable, str(directory / "make_data.py"), str(directory)], check=True, timeout=60
    )
    return directory


@pytest.mark.long
def test_a_model_plays_with_a_calculator(tools: Path, tmp_path: Path) -> None:
    # With other seeds this model of random weights calls once in a hundred times, and then in some
    # step not at all.
    settings = (
        "data.seed=3",
        "trainer.steps=3",
        "evaluation.everySteps=3",
        "debug.dumpRollouts=true",
    )
    run = Laptop(tools, tmp_path / "run", *settings)
    assert run.run() == 0, run.text()[-3000:]
    sound(run)
    samples = [
        s
        for path in rollouts.steps(run.directory / "rollouts").values()
        for g in rollouts.read(path)
        for s in g.samples
    ]
    called = [s for s in samples if s.metadata.get("called")]
    assert len(samples) == 3 * 32 * 8
    assert called, "one word in twelve is a call"
    for sample in called:
        assert sample.loss_mask.tolist() == [1, 0, 0] + [1] * (sample.response_length - 3)
    for record in run.steps().values():
        assert record["train/train_rollout_logprob_abs_diff_max"] < 1e-4
        assert record["multi_turn/turns/max"] == 2
