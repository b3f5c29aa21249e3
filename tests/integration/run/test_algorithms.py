"""Estimators on real engines: a critic with a killed trainer, and greedy responses for ReMax."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.run.laptop import Laptop, processes_of, values

pytestmark = pytest.mark.timeout(600)
Make = Callable[..., Laptop]
SMALL = ("rollout.batchSize=16", "checkpoint.everySteps=3", "evaluation=null")


def check_sound(run: Laptop, steps: int) -> None:
    summary = run.summary()
    assert summary["state"] == "Succeeded", run.text()[-2000:]
    assert (
        summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    )
    assert summary["groups_trained"] == summary["groups_leased"] == steps * 16
    assert processes_of(run.directory) == []


@pytest.mark.long
def test_ppo_with_a_critic_survives_a_killed_trainer_to_the_bit(laptop: Make) -> None:
    run = laptop(
        *SMALL,
        "trainer.steps=9",
        "algorithm.estimator=ppo",
        "algorithm.lambda=0.95",
        "algorithm.critic={lr: 1e-3, warmupSteps: 1}",
        "algorithm.kl={coef: 0.01}",
    )
    run.start()
    run.until_step(5)
    run.kill("trainer")
    assert run.wait(280) == 0, run.text()[-3000:]
    check_sound(run, 9)
    records = run.steps()
    assert "train/loss" not in records[1], "the first step warms the critic up"
    assert "train/loss" in records[2]
    assert all(record["critic/vf_loss"] >= 0 for record in records.values())
    assert records[1]["rollout/values"] == 0, "a critic of a language model begins with 0"
    assert records[9]["rollout/values"] != 0
    assert max(abs(value) for value in values(list(records.values())[1:], "train/ppo_kl")) <= 1e-6
    assert run.replayed(), "the trainer was killed between two checkpoints"
    for step, again in run.replayed().items():
        seen = {
            (r.get("train/loss"), r["critic/vf_loss"], r["critic/grad_norm"], r["rollout/values"])
            for r in again
        }
        assert len(seen) == 1, f"step {step} was replayed differently: {again}"


@pytest.mark.long
def test_remax_scores_a_greedy_response_that_is_not_trained(laptop: Make) -> None:
    run = laptop(*SMALL, "trainer.steps=3", "algorithm.estimator=remax")
    assert run.run() == 0, run.text()[-3000:]
    check_sound(run, 3)
    assert run.summary()["samples_trained"] == 3 * 16 * 8
    assert any(record["rollout/advantages"] != 0 for record in run.steps().values())


@pytest.mark.long
def test_own_functions_for_estimator_and_loss(laptop: Make, example: Path) -> None:
    (example / "mine.py").write_text(
        "from sluice_trainer.algorithms.advantages import leave_one_out\n\n\n"
        "def advantages(responses, algorithm):\n"
        "    return list(leave_one_out(responses.rewards, responses.groups)[responses.own])\n\n\n"
        "def loss(log_probs, entropy, inputs, algorithm):\n"
        "    return -inputs.advantages * log_probs, {'mine': entropy}\n"
    )
    run = laptop(
        *SMALL,
        "trainer.steps=2",
        "algorithm.estimator=custom",
        "algorithm.function=mine.py:advantages",
        "algorithm.loss.function=mine.py:loss",
    )
    assert run.run() == 0, run.text()[-3000:]
    check_sound(run, 2)
    assert all(
        record["train/mine"] == record["train/entropy_loss"] for record in run.steps().values()
    )
    assert json.loads((run.directory / "job.json").read_text())["spec"]["algorithm"][
        "function"
    ].startswith("/")
