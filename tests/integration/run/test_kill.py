"""`kill -9` of any process at a random moment: the run recovers and trains every group once."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.run.laptop import PROGRAMS, Laptop, processes_of

pytestmark = pytest.mark.timeout(900)
STEPS_BETWEEN, GROUPS = 2, 8


def seed() -> int:
    """Return SLUICE_TEST_SEED, which repeats a run, or a new seed; a failed test prints it."""
    return int(os.environ.get("SLUICE_TEST_SEED", random.SystemRandom().randrange(10**6)))


def test_every_process_may_be_killed(laptop: Callable[..., Laptop], engine: str) -> None:
    kill_each_process(laptop, f"rollout.engine={engine}")


@pytest.mark.long
def test_every_process_may_be_killed_while_an_adapter_trains(
    laptop: Callable[..., Laptop], pretrained: Path
) -> None:
    """An engine that joins reads the model from disk, and gets the newest adapter alone."""
    kill_each_process(
        laptop,
        f"model={{path: {pretrained}, init: pretrained}}",
        "weightSync={lora: adapter, pauseMode: versions}",
        "trainer.backend=fsdp",
        "trainer.lora={rank: 4, alpha: 8}",
        "trainer.optimizer.lr=0.01",
    )


def kill_each_process(laptop: Callable[..., Laptop], *overrides: str) -> None:
    """All roles and `sluice run` itself, one after the other in random order, within one run."""
    chosen = seed()
    print("SLUICE_TEST_SEED", chosen)
    draw = random.Random(chosen)
    victims = [*PROGRAMS, "run"]
    draw.shuffle(victims)
    total = STEPS_BETWEEN * (len(victims) + 1) + 4
    run = laptop(
        *overrides,
        f"trainer.steps={total}",
        f"rollout.batchSize={GROUPS}",
        f"data.seed={chosen % 1000}",
    )
    run.start()
    for number, victim in enumerate(victims):
        run.until_step(2 + STEPS_BETWEEN * number)
        time.sleep(draw.random() * 1.5)
        print("kill", victim, "at step", run.step())
        run.kill(victim)
        if victim == "run":
            run.start()
    assert run.wait(300) == 0, run.text()[-3000:]
    summary = run.summary()
    assert summary["state"] == "Succeeded"
    assert summary["steps"] == total
    assert (
        summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    )
    assert summary["groups_trained"] == summary["groups_leased"] == total * GROUPS
    assert summary["logprob_diff_max"] <= 1e-4
    for step, records in run.replayed().items():
        seen = {(r["train/loss"], r["train/grad_norm"], r["rollout/raw_reward"]) for r in records}
        assert len(seen) == 1, f"step {step} was replayed differently: {records}"
    assert processes_of(run.directory) == []
