"""An adapter trains with a real engine, which gets it merged or alone; both may die."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.run.laptop import Laptop, values

pytestmark = pytest.mark.timeout(600)

RANK = 4


@pytest.mark.parametrize(
    ("backend", "sync", "transport"),
    [
        pytest.param("fsdp", "merged", "gloo", marks=pytest.mark.long),
        pytest.param("fsdp", "adapter", "gloo", marks=pytest.mark.long),
        ("megatron", "adapter", "disk"),
    ],
)
def test_an_adapter_trains_although_trainer_and_engine_are_killed(
    backend: str, sync: str, transport: str, pretrained: Path, laptop: Callable[..., Laptop]
) -> None:
    run = laptop(
        f"model={{path: {pretrained}, init: pretrained}}",
        f"weightSync={{lora: {sync}, transport: {transport}}}",
        f"trainer.backend={backend}",
        f"trainer.lora={{rank: {RANK}, alpha: 8}}",
        "trainer.optimizer.lr=0.01",
        "trainer.steps=6",
        "rollout.batchSize=16",
        "checkpoint.everySteps=2",
        "algorithm.kl={lossCoef: 0.001, type: low_var_kl}",
    )
    run.start()
    run.until(lambda: len(run.steps()) >= 2, "two steps are trained", 300)
    run.kill("trainer")
    run.until(lambda: len(run.steps()) >= 4, "the next trainer goes on", 300)
    run.kill("engine")
    assert run.wait(300) == 0, run.text()[-3000:]
    summary = run.summary()
    assert (summary["state"], summary["steps"]) == ("Succeeded", 6)
    assert summary["groups_trained"] == 6 * 16
    logs = "".join(file.read_text() for file in (run.directory / "logs").glob("*trainer*"))
    assert ("model of the adapter" in logs) == (sync == "adapter"), "it compares the models"
    records = list(run.steps().values())
    # The engine computes with the trainer's weights.
    assert max(values(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert values(records, "train/kl_loss")[-1] > 0, "the reference is the model without adapter"
    for step, again in run.replayed().items():
        assert len({r["train/loss"] for r in again}) == 1, f"step {step} was replayed differently"
    checkpoints = run.directory / "checkpoints"
    adapter = load_file(checkpoints / "adapter/adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in adapter.items() if ".lora_A." in name} == {RANK}
    assert any(tensor.abs().max() > 0 for name, tensor in adapter.items() if ".lora_B." in name)
    assert (checkpoints / "hf/model.safetensors").exists()
    assert not list((checkpoints / "iter_0000006").glob("*.distcp")), "no weights of the base"


@pytest.mark.parametrize("engine", ["sglang", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_responses_of_an_asynchronous_run_keep_the_version_that_they_began_with(
    engine: str, pretrained: Path, laptop: Callable[..., Laptop]
) -> None:
    run = laptop(
        f"model={{path: {pretrained}, init: pretrained}}",
        "weightSync={lora: adapter, pauseMode: versions}",
        "trainer.backend=fsdp",
        f"trainer.lora={{rank: {RANK}, alpha: 8}}",
        "trainer.optimizer.lr=0.01",
        "trainer.steps=8",
        f"rollout.engine={engine}",
        "rollout.batchSize=16",
        "rollout.mode=async",
        "rollout.maxStaleness=2",
    )
    run.start()
    assert run.wait(300) == 0, run.text()[-3000:]
    records = list(run.steps().values())
    assert len(records) == 8
    # The trainer's log-probs of what the newest weights sampled are the engine's.
    name = "train/train_rollout_logprob_abs_diff_on_policy"
    differences = [record[name] for record in records if name in record]
    assert 0 < max(differences) <= 1e-4
    samples = [
        json.loads(line)
        for file in (run.directory / "samples").glob("step_*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert samples
    assert {len(set(sample["weight_versions"])) for sample in samples} == {1}
