"""Checks of a run in pods that has ended, and how long its parts may take."""

from __future__ import annotations

import pytest

from tests.node.jobs import Quickstart

GROUPS_PER_STEP = 32
# Generous: an engine needs 15 s on two idle cores, and minutes on busy ones.
START_SECONDS, STOP_SECONDS = 300, 240


def check_sound(run: Quickstart, steps: int) -> None:
    """Check that all groups are trained once and none is lost, that steps trained again are the
    same, and that the model has learnt."""
    status = run.status()
    assert (status["state"], status["step"], status["weightVersion"]) == ("Succeeded", steps, steps)
    run.until_drained()
    trained = steps * GROUPS_PER_STEP
    assert run.counters() == {
        "groups_leased": trained,
        "groups_trained": trained,
        "groups_lost": 0,
        "groups_trained_twice": 0,
    }
    records = run.metrics()
    by_step: dict[int, set[tuple[float, float]]] = {}
    for record in records:
        by_step.setdefault(record["step"], set()).add(
            (record["train/loss"], record["rollout/raw_reward"])
        )
    assert sorted(by_step) == list(range(1, steps + 1))
    assert all(len(seen) == 1 for seen in by_step.values()), f"replayed differently: {by_step}"
    assert max(record["train/train_rollout_logprob_abs_diff_max"] for record in records) <= 1e-4
    assert float(status["reward"]) == pytest.approx(records[-1]["rollout/raw_reward"], abs=1e-3)
    assert records[-1]["rollout/raw_reward"] > 2 * records[0]["rollout/raw_reward"]
    assert (run.checkpoints / "hf/model.safetensors").exists()
