"""A whole run with FSDP2 on two ranks and the real engine: it trains, and outlives its trainer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.run.laptop import Laptop, values
from tests.integration.run.test_run import check_sound, exported_model_answers

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_a_run_with_fsdp_trains_and_survives_the_kill_of_a_rank(
    laptop: Callable[..., Laptop],
) -> None:
    run = laptop(
        "trainer.backend=fsdp",
        "trainer.processesPerNode=2",
        "trainer.steps=9",
        "rollout.batchSize=16",
        "checkpoint.everySteps=3",
        "checkpoint.async=true",
        "data.seed=3",
    )
    run.start()
    run.until_step(5)
    run.kill("trainer")
    assert run.wait(300) == 0, run.text()[-3000:]
    check_sound(run, 9, groups=16)
    records = list(run.steps().values())
    assert max(values(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert max(map(abs, values(records, "train/ppo_kl"))) <= 1e-6
    assert min(values(records, "train/grad_norm")) > 0
    replayed = run.replayed()
    for step, again in replayed.items():
        assert len({r["train/loss"] for r in again}) == 1, f"step {step} was replayed otherwise"
    exported_model_answers(run.directory / "checkpoints/hf")
