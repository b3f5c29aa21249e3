"""`sluice run` of supervised fine-tuning: without an engine, through a killed trainer,
to the bit.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.run.laptop import ROOT, Laptop, processes_of, values

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    directory = tmp_path / "sft"
    shutil.copytree(
        ROOT / "examples/sft",
        directory,
        ignore=shutil.ignore_patterns("*.jsonl", "model", "__pycache__"),
    )
    subprocess.run(
        [sys.executable, str(directory / "make_data.py"), str(directory)], check=True, timeout=60
    )
    return directory


def test_conversations_are_learned_without_engines_through_a_killed_trainer(
    example: Path, tmp_path: Path
) -> None:
    run = Laptop(
        example,
        tmp_path / "run",
        "evaluation=null",
        "data.prompts[0].path=train.jsonl@[0:500]",
        "rollout.batchSize=50",
        "trainer.epochs=2",
        "trainer.stepsPerBatch=2",
        "checkpoint.everySteps=4",
        "debug.dumpRollouts=true",
        "debug.profile=[2,6]",
    )
    summary, records = run.run_through_a_killed_trainer(6), run.steps()
    assert (
        summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    )
    assert list(records) == list(range(1, 21))
    assert processes_of(run.directory) == []
    assert not list((run.directory / "logs").glob("*rollout*")), "nothing is generated"

    losses = values(records.values(), "train/loss")
    assert losses[-1] < 0.5 * losses[0]
    assert run.replayed(), "the trainer was killed between two checkpoints"
    for step, again in run.replayed().items():
        assert len({(r["train/loss"], r["train/grad_norm"]) for r in again}) == 1, (
            f"step {step}: {again}"
        )
    trained_in_each_epoch(run.directory)
    profiled(run.directory, [2, 6])

    assert summary["reward_first"] is None
    assert summary["loss_last"] == losses[-1]
    assert f"loss {losses[-1]:.3f}" in run.text()
    assert "reward" not in run.text()
    assert (run.directory / "loss.png").exists()
    report = (run.directory / "report.html").read_text()
    assert "<figcaption><b>Loss</b>" in report
    assert "<figcaption><b>Age of the samples</b>" in report
    for absent in ("Reward", "Distance of the policy", "Trainer against engine", "Warnings"):
        assert f"<figcaption><b>{absent}" not in report
        assert f"<h2>{absent}" not in report
    row = json.loads((run.directory / "samples/step_0000001.jsonl").read_text().splitlines()[0])
    assert row["reward"] is None
    assert row["response"].endswith("<eos>")


def profiled(directory: Path, steps: list[int]) -> None:
    """Each of these steps has a trace, of all its phases."""
    paths = sorted((directory / "profiles").iterdir())
    assert [path.name for path in paths] == [
        f"step_{step:07d}_rank_0.trace.json.gz" for step in steps
    ]
    for path in paths:
        bars = {
            event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        }
        assert {"sluice: wait for samples", "sluice: train", "aten::mm"} <= bars


def trained_in_each_epoch(directory: Path) -> None:
    """Check that every epoch has each conversation once, in another order."""
    from sluice.telemetry import rollouts

    order = [
        group.prompt.row
        for path in rollouts.steps(directory / "rollouts").values()
        for group in rollouts.read(path)
    ]
    first, second = order[:500], order[500:]
    assert set(Counter(first).values()) == set(Counter(second).values()) == {1}
    assert sorted(first) == sorted(second) == list(range(500))
    assert first != second
