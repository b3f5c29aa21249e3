"""The example of preferences: sft; dpo and a reward model, through killed trainers; and GRPO."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.telemetry import run_directory
from tests.integration.run.laptop import ROOT, Laptop, values

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    directory = tmp_path / "preference"
    shutil.copytree(
        ROOT / "examples/preference",
        directory,
        ignore=shutil.ignore_patterns("*.jsonl", "model", "__pycache__"),
    )
    command = [sys.executable, str(directory / "make_data.py"), str(directory)]
    subprocess.run(command, check=True, timeout=60)
    return directory


def of(example: Path, name: str, *overrides: str) -> Laptop:
    """Return the run of one of the example's jobs, whose model is that of the first one."""
    shutil.copyfile(example / f"{name}.yaml", example / "job.yaml")
    return Laptop(example, example.parent / name, *overrides)


def killed_after(run: Laptop, step: int) -> None:
    """Run it, and kill the trainer once after this step: no pair may be lost or trained twice."""
    summary = run.run_through_a_killed_trainer(step, 300)
    assert summary["restarts"] == 1
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
    for number, again in run.replayed().items():
        assert len({record["train/loss"] for record in again}) == 1, f"step {number}: {again}"


def held_out(run: Laptop, metric: str) -> dict[int, float]:
    """Return a metric of the held-out pairs by version; of a step trained again the last one."""
    records = run_directory.records(run.directory / run_directory.EVALUATION)
    name = f"eval/pairs/{metric}"
    return {record["version"]: record[name] for record in records if name in record}


def test_pairs_teach_more_after_few_conversations(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = of(example, "sft")
    assert first.run() == 0, first.text()[-3000:]
    model = f"model.path={first.directory}/checkpoints/hf"

    policy = of(example, "dpo", model, "checkpoint.everySteps=8")
    killed_after(policy, 12)
    records = list(policy.steps().values())
    assert len(records) == 32
    accuracies = values(records, "train/rewards/accuracies")
    # Every tenth pair is the wrong way round.
    assert sum(accuracies[-8:]) / 8 > 0.75 > accuracies[0]
    before, after = first.summary()["eval_last"], policy.summary()["eval_last"]
    assert after > before + 0.05

    unseen = held_out(policy, "rewards/accuracies")
    assert [*unseen] == [0, 8, 16, 24, 32]
    assert unseen[32] > 0.85, "held-out pairs are never the wrong way round"
    assert held_out(policy, "loss")[32] < held_out(policy, "loss")[0]

    judge = of(example, "reward", model, "checkpoint.everySteps=8")
    killed_after(judge, 12)
    accuracies = values(judge.steps().values(), "train/rewards/accuracies")
    assert sum(accuracies[-8:]) / 8 > 0.75
    unseen = held_out(judge, "rewards/accuracies")
    assert unseen[max(unseen)] > 0.9

    monkeypatch.setenv("REWARD_MODEL", str(judge.directory / "checkpoints/hf"))
    learned = of(example, "grpo", model)
    assert learned.run(600) == 0, learned.text()[-3000:]
    assert learned.summary()["eval_last"] > before + 0.05
