"""Engines that are late in an update."""

from __future__ import annotations

import pytest

from sluice_trainer.weights.lateness import CONNECTING, FACTOR, StepTimes

FLOOR = 2.0


def step_times(**earlier: float) -> StepTimes:
    """Return times of engines whose last update took these seconds for the step."""
    measured = StepTimes(FLOOR)
    for name, seconds in earlier.items():
        measured.passed("step", name, seconds)
    measured.begin()
    return measured


@pytest.mark.parametrize(
    ("passed", "suspects", "earlier", "limit"),
    [
        pytest.param({"b": 0.1}, ["a"], {}, FLOOR, id="the other was quick"),
        pytest.param({"b": 5.0}, ["a"], {}, FACTOR * 5, id="the other was slow"),
        pytest.param({"b": 1.0, "c": 7.0}, ["a"], {}, FACTOR * 7, id="by the slowest"),
        pytest.param({"b": 0.1}, ["a", "c"], {}, None, id="two of three wait"),
        pytest.param({"b": 0.1, "c": 0.1}, ["a", "d"], {}, FLOOR, id="two of four wait"),
        pytest.param({}, ["a", "b"], {"a": 1.0, "b": 1.0}, None, id="all wait"),
        pytest.param({}, ["a"], {}, None, id="there is no other"),
        pytest.param({}, ["a"], {"a": 9.0}, None, id="its own past does not count"),
        pytest.param({}, ["a"], {"b": 3.0}, FACTOR * 3, id="alone, after an update of others"),
    ],
)
def test_an_engine_is_late_compared_with_the_others(
    passed: dict[str, float], suspects: list[str], earlier: dict[str, float], limit: float | None
) -> None:
    measured = step_times(**earlier)
    assert measured.limit("step", "a", passed, suspects, connecting=False) == limit


def test_an_engine_whose_communicator_is_created_has_more_time() -> None:
    limit = step_times().limit("step", "a", {"b": 0.1}, ["a"], connecting=True)
    assert limit == FLOOR * CONNECTING


def test_of_an_earlier_update_the_slowest_bucket_counts() -> None:
    measured = StepTimes(FLOOR)
    for seconds in (4.0, 1.0):
        measured.passed("step", "b", seconds)
    measured.begin()
    assert measured.limit("step", "a", {}, ["a"], connecting=False) == FACTOR * 4


def test_engines_that_were_scaled_down_do_not_count() -> None:
    measured = step_times(b=3.0)
    assert measured.has_others("a")
    measured.keep(["a"])
    assert not measured.has_others("a")
    assert measured.limit("step", "a", {}, ["a"], connecting=False) is None
