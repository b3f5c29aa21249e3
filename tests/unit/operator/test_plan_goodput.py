"""Goodput in the status: counted on over restarts, and not written for each second."""

from __future__ import annotations

from sluice_operator.plan import Progress
from tests.unit.operator.world import settled


def progress(step: int, **seconds: float) -> Progress:
    """seconds: of trainer/<state>."""
    states = {f"trainer/{state}": value for state, value in seconds.items()}
    counters = {"groups_trained": 3, "groups_filtered": 1}
    states["rollout/generating"] = 100.0
    return Progress(step, 10, device_seconds=states, counters=counters)


def test_goodput_is_in_the_status_with_each_step() -> None:
    world = settled()
    world.progress = progress(1, training=50.4, waiting=50)
    world.settle()
    goodput = world.status.goodput
    assert goodput is not None
    assert goodput.ratio == "0.63"
    assert goodput.seconds == {"trained": 50, "generated": 75, "thrown_away": 25, "waited": 50}
    assert goodput.states == {
        "trainer/training": 50,
        "trainer/waiting": 50,
        "rollout/generating": 100,
    }
    world.progress = progress(2, training=51, waiting=50)
    world.settle()
    assert world.status.goodput.states["trainer/training"] == 51  # type: ignore[union-attr]


def test_a_rendezvous_that_restarts_takes_nothing_back() -> None:
    world = settled()
    world.progress = progress(1, training=500.6)
    world.settle()
    world.progress = progress(2, training=7.6)
    world.settle()
    world.progress = progress(3, training=9.9)
    world.settle()
    goodput = world.status.goodput
    assert goodput is not None
    assert goodput.states == {"trainer/training": 509, "rollout/generating": 200}
    assert goodput.earlier == {"trainer/training": 500, "rollout/generating": 100}


def test_time_alone_is_told_once_it_has_grown_by_a_share() -> None:
    world = settled()
    world.progress = progress(1, waiting=100)
    world.settle()
    before = world.status.goodput
    world.progress = progress(1, waiting=109)
    world.settle()
    assert world.status.goodput == before
    world.progress = progress(1, waiting=111)
    world.settle()
    assert world.status.goodput.seconds["waited"] == 111  # type: ignore[union-attr]


def test_a_service_that_does_not_count_leaves_it_out() -> None:
    world = settled()
    world.progress = Progress(1, 10)
    world.settle()
    assert world.status.goodput is None
