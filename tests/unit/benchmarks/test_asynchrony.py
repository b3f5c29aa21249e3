"""Figures of a run in the comparison of synchronous and asynchronous training."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.asynchrony import (
    QUICKSTART,
    WARM_UP,
    figures_of,
    predicted_gain,
    row,
    split_of,
)
from sluice.telemetry.planner import Split

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_start_does_not_count_and_rewards_are_those_of_the_end() -> None:
    slow = {"perf/step_time": 100.0, "rollout/tokens": 1.0, "rollout/raw_reward": 0.0}
    steps = [
        {
            "perf/step_time": 2.0,
            "perf/train_wait_time": 1.0,
            "rollout/tokens": 50.0,
            "rollout/raw_reward": reward,
            "rollout/policy_lag": 1.0,
        }
        for reward in (0.0, 0.0, 0.0, 0.5, 1.0)
    ]
    spent = {
        "rollout/starting": 90.0,
        "rollout/generating": 6.0,
        "rollout/tail": 3.0,
        "rollout/idle": 1.0,
        "trainer/waiting": 5.0,
    }
    figures = figures_of([slow] * WARM_UP + steps, {"device_seconds": spent})
    assert (figures.seconds, figures.tokens, figures.waiting, figures.lag) == (2.0, 25.0, 0.5, 1.0)
    assert (figures.idle, figures.tail) == (0.1, 0.3)
    assert figures.reward == 0.75
    assert (
        row("partial", figures, 5.0, 2.8)
        == "| partial | 2.00 | 2.50 times | 2.80 times | 25 | 50% | 10% | 30% | 0.750 | 1.00 |"
    )
    assert "| 1.00 times |  | 25 |" in row("sync", figures, 2.0, None)


def test_the_gain_is_said_before_it_is_measured() -> None:
    states = {"rollout/generating": 10.0, "rollout/tail": 50.0, "trainer/training": 10.0}
    now = Split(1, 1)
    assert predicted_gain(states, 10, now, 1) == pytest.approx(2.0), "two batches under way"
    assert predicted_gain(states, 10, now, 9) == pytest.approx(7 / 2.5), "a full engine"
    assert predicted_gain({}, 10, now, 2) is None


@pytest.mark.parametrize(
    ("manifest", "chosen", "split"),
    [
        pytest.param(QUICKSTART / "job.yaml", ["rollout.replicas=2"], Split(2, 1), id="CPUs"),
        pytest.param(EXAMPLES / "reasoning/two-gpus.yaml", [], Split(1, 1), id="two GPUs"),
    ],
)
def test_a_jobs_devices(manifest: Path, chosen: list[str], split: Split) -> None:
    assert split_of(manifest, chosen) == split
