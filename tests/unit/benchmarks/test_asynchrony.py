"""Figures of a run in the comparison of synchronous and asynchronous training."""

from __future__ import annotations

from benchmarks.asynchrony import WARM_UP, figures_of, row


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
        "rollout/generating": 9.0,
        "rollout/idle": 1.0,
        "trainer/waiting": 5.0,
    }
    figures = figures_of([slow] * WARM_UP + steps, {"device_seconds": spent})
    assert (figures.seconds, figures.tokens, figures.waiting, figures.lag) == (2.0, 25.0, 0.5, 1.0)
    assert figures.idle == 0.1
    assert figures.reward == 0.75
    assert "| 2.00 | 2.50 times | 25 | 50% | 10% | 0.750 | 1.00 |" in row("partial", figures, 5.0)
