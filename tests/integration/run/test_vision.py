"""`sluice run` of the example with images: rows, engine and trainer see the same images."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.run.laptop import ROOT, Laptop, processes_of, values

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    directory = tmp_path / "vision"
    shutil.copytree(
        ROOT / "examples/vision",
        directory,
        ignore=shutil.ignore_patterns("*.jsonl", "model", "images", "__pycache__"),
    )
    subprocess.run(
        [sys.executable, str(directory / "make_data.py"), str(directory)], check=True, timeout=120
    )
    return directory


def test_engine_and_trainer_see_the_same_images_through_a_killed_trainer(
    example: Path, tmp_path: Path
) -> None:
    run = Laptop(
        example,
        tmp_path / "run",
        "rollout.batchSize=8",
        "trainer.steps=5",
        "checkpoint.everySteps=2",
        "checkpoint.exportHF=true",
        "evaluation.everySteps=5",
    )
    summary, records = run.run_through_a_killed_trainer(3), run.steps()
    assert summary["groups_lost"] == summary["groups_failed"] == 0
    assert list(records) == [1, 2, 3, 4, 5]
    assert processes_of(run.directory) == []

    # Those of sampled prompts, and of the evaluations'.
    assert len(list((run.directory / "samples/images").glob("*.jpg"))) > 2 * len(records)

    # Equal log-probs mean equal tokens, pixels and positions, and weights that arrived.
    assert max(values(records.values(), "train/train_rollout_logprob_abs_diff_max")) < 1e-4
    # The question has 23 tokens besides those of its image, of which there are one to nine.
    for length in values(records.values(), "rollout/total_lengths"):
        assert 24 < length < 50
    before = load_file(example / "model/model.safetensors")
    (exported,) = run.directory.rglob("hf/model.safetensors")
    after = load_file(exported)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (".visual." in name), name


@pytest.mark.long
@pytest.mark.parametrize("mode", ["in_place", "versions"])
def test_an_adapter_trains_with_images_and_is_sent_alone(
    mode: str, example: Path, tmp_path: Path
) -> None:
    run = Laptop(
        example,
        tmp_path / "run",
        "rollout.batchSize=8",
        "trainer.steps=3",
        "trainer.lora={rank: 4}",
        "trainer.optimizer.lr=0.001",
        f"weightSync={{lora: adapter, pauseMode: {mode}}}",
    )
    run.start()
    assert run.wait(280) == 0, run.text()[-3000:]
    records = run.steps()
    assert list(records) == [1, 2, 3]
    assert max(values(records.values(), "train/train_rollout_logprob_abs_diff_max")) < 1e-4
    (adapter,) = run.directory.rglob("adapter/adapter_model.safetensors")
    trained = load_file(adapter)
    assert not [name for name in trained if ".visual." in name]
    assert max(float(t.abs().max()) for name, t in trained.items() if ".lora_B." in name) > 0


@pytest.mark.long
def test_given_answers_are_learned_from_images_without_engines(
    example: Path, tmp_path: Path
) -> None:
    run = Laptop(
        example,
        tmp_path / "run",
        "algorithm={loss: {type: sft}}",
        "reward=null",
        "rollout={batchSize: 16}",
        "evaluation=null",
        "trainer.steps=6",
        "trainer.freeze=[]",
        "checkpoint.everySteps=2",
    )
    summary, records = run.run_through_a_killed_trainer(3), run.steps()
    assert summary["groups_lost"] == summary["groups_failed"] == 0
    assert not list((run.directory / "logs").glob("*rollout*")), "nothing is generated"
    losses = values(records.values(), "train/loss")
    assert losses[-1] < 0.8 * losses[0]
    # Each row has its image, and the tower sees each in training and not before.
    assert values(records.values(), "rollout/images") == [16.0] * 6
    assert all(0 < share < 1 for share in values(records.values(), "perf/tower_time_ratio"))
    assert list((run.directory / "samples/images").glob("*.jpg"))
