"""Trainer and engine that take turns, on the real engines: the same results, and either may die in
the other's turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.telemetry import run_directory
from tests.integration.run.laptop import Laptop, processes_of, values

pytestmark = pytest.mark.timeout(600)


# The line of an engine's log that says that it goes to rest.
REST = {"sglang": "POST /release_memory_occupation", "vllm": "POST /pause?mode=abort"}
# The argument that makes the engine write that line.
WITH_REQUESTS = {"sglang": "{logLevelHttp: info}", "vllm": "{disableUvicornAccessLog: false}"}


def rests(run: Laptop, engine: str, attempt: int) -> int:
    """Number of times that the engine of this attempt has gone to rest."""
    log = run.directory / f"logs/quickstart-rollout-0-{attempt}-0.engine.log"
    return log.read_text().count(REST[engine]) if log.exists() else 0


@pytest.mark.parametrize("backend", ["megatron", pytest.param("fsdp", marks=pytest.mark.long)])
def test_trainer_and_engine_take_turns_and_either_may_be_killed_at_rest(
    laptop: Callable[..., Laptop], engine: str, backend: str
) -> None:
    run = laptop(
        f"rollout.engine={engine}",
        f"rollout.engineArgs={WITH_REQUESTS[engine]}",
        f"trainer.backend={backend}",
        "trainer.colocate=true",
        "trainer.offload=all",
        "trainer.steps=6",
        "rollout.batchSize=16",
        "checkpoint.everySteps=2",
        "algorithm.kl={lossCoef: 0.001, type: low_var_kl}",
        "weightSync.bucketMiB=1",
    )
    run.start()
    run.until(lambda: rests(run, engine, 1) >= 2, "the engine rests in the first step", 300)
    run.kill("engine")
    run.until(lambda: rests(run, engine, 2) >= 2, "the next engine rests", 300)
    run.kill("trainer")
    assert run.wait(300) == 0, run.text()[-3000:]
    summary = run.summary()
    assert summary["state"] == "Succeeded", run.text()[-2000:]
    assert summary["steps"] == 6
    assert (
        summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    )
    assert summary["groups_trained"] == 6 * 16
    assert not (run.directory / "logs/quickstart-rollout-0-3-0.engine.log").exists(), (
        "one engine was killed, by us"
    )
    records = list(run.steps().values())
    assert max(values(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert max(map(abs, values(records, "train/ppo_kl"))) <= 1e-6
    assert max(values(records, "rollout/policy_lag")) == 0
    assert min(values(records, "perf/wake_up_time")) > 0
    assert min(values(records, "train/grad_norm")) > 0
    assert values(records, "train/kl_loss")[-1] > 0, "the weights are no longer those of the start"
    for step, again in run.replayed().items():
        assert len({r["train/loss"] for r in again}) == 1, (
            f"step {step} was replayed differently: {again}"
        )
    evaluated = {r["version"] for r in run_directory.records(run.directory / "evaluation.jsonl")}
    assert evaluated == {0, 5, 6}, "evaluations end before the engine rests"
    assert processes_of(run.directory) == []
