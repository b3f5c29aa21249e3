"""The learning-rate schedule, step by step."""

from __future__ import annotations

import pytest

from sluice.api import Optimizer
from sluice.api.groups.algorithm import Critic
from sluice_trainer.step.rates import learning_rate, steps_of_policy


def rates(steps: int, total: int | None = 8, **spec: object) -> list[float]:
    optimizer = Optimizer.model_validate({"lr": 1.0, **spec})
    return [learning_rate(step, optimizer, total) for step in range(steps)]


def test_a_constant_rate_needs_no_length() -> None:
    assert rates(3, None) == [1, 1, 1]


def test_warm_up_reaches_the_full_rate_in_its_last_step() -> None:
    assert rates(5, warmupSteps=4) == [0.25, 0.5, 0.75, 1, 1]


def test_linear_decay_ends_at_the_minimum() -> None:
    assert rates(6, 4, schedule="linear", minLr=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_decay_begins_after_warm_up() -> None:
    assert rates(6, 6, schedule="linear", warmupSteps=2) == pytest.approx(
        [0.5, 1, 1, 0.75, 0.5, 0.25]
    )


def test_cosine_decay_is_half_way_at_half_time() -> None:
    values = rates(9, schedule="cosine", minLr=0.5)
    assert (values[0], values[4], values[8]) == pytest.approx((1, 0.75, 0.5))


def test_decay_steps_override_the_length_of_the_run() -> None:
    assert rates(3, 100, schedule="linear", decaySteps=2) == [1, 0.5, 0]


def test_a_run_may_be_shorter_than_its_warm_up() -> None:
    assert rates(3, 2, schedule="linear", warmupSteps=2) == pytest.approx([0.5, 1, 1])


def test_decay_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="decaySteps"):
        rates(1, None, schedule="cosine")


def test_the_decay_of_the_policy_ends_with_the_run_after_a_warm_up_of_the_critic() -> None:
    steps = steps_of_policy(8, Critic(warmup_steps=3))
    assert rates(6, steps, schedule="linear") == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0])


def test_without_a_critic_every_step_trains_the_policy() -> None:
    assert steps_of_policy(8, None) == 8


def test_a_run_of_unknown_length_has_no_number_of_policy_steps() -> None:
    assert steps_of_policy(None, Critic(warmup_steps=3)) is None
