"""An adapter trains with a real engine, which gets merged weights; trainer and engine may die."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from safetensors.torch import load_file

from tests.integration.run.laptop import Laptop, values

pytestmark = pytest.mark.timeout(600)

RANK = 4


def test_an_adapter_trains_although_trainer_and_engine_are_killed(
    laptop: Callable[..., Laptop],
) -> None:
    run = laptop(
        "trainer.backend=fsdp",
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
    records = list(run.steps().values())
    # The engine computes with the weights that the trainer has merged.
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
