import pytest

from sluice.telemetry.goodput import DeviceSeconds, Goodput


def test_goodput_is_what_trained_and_generated() -> None:
    seconds = {
        "trainer/training": 40.0,
        "trainer/waiting": 30.0,
        "trainer/publishing": 10.0,
        "trainer/saving": 5.0,
        "trainer/starting": 10.0,
        "trainer/restarting": 5.0,
        "rollout/generating": 80.0,
        "rollout/idle": 15.0,
        "rollout/synchronising": 5.0,
    }
    goodput = Goodput.from_counters(seconds, {"groups_trained": 10}, 10, colocated=False)
    assert goodput.total == 200
    assert goodput.ratio == pytest.approx(0.6)
    assert goodput.seconds["waited"] == 45
    assert goodput.seconds["synchronised"] == 15
    assert (goodput.seconds["saved"], goodput.seconds["started"]) == (5, 10)
    assert goodput.seconds["restarted"] == 5


def test_tails_are_a_separate_part_of_generated() -> None:
    seconds = {
        "rollout/generating": 30.0,
        "rollout/tail": 90.0,
        "rollout/idle": 80.0,
        "trainer/training": 200.0,
    }
    counters = {"groups_trained": 10, "groups_filtered": 10}
    goodput = Goodput.from_counters(seconds, counters, 10, colocated=False)
    assert goodput.seconds["generated"] == 60.0, "half of it came to nothing"
    assert goodput.parts()["generated_in_tails"] == 45.0
    assert sum(goodput.parts().values()) == goodput.total
    assert goodput.text() == (
        "65% (0.111 device hours: 50% trained, 20% waited, 15% thrown away, 11% generated in "
        "tails, 4% generated)"
    )


def test_wasted_groups_and_repeated_steps_are_thrown_away() -> None:
    seconds = {"trainer/training": 100.0, "rollout/generating": 100.0}
    counters = {
        "groups_trained": 60,
        "groups_filtered": 20,
        "groups_failed": 10,
        "groups_outdated": 10,
        "steps_redone": 5,
    }
    goodput = Goodput.from_counters(seconds, counters, 15, colocated=False)
    assert goodput.seconds["trained"] == pytest.approx(75)
    assert goodput.seconds["generated"] == pytest.approx(60)
    assert goodput.seconds["thrown_away"] == pytest.approx(65)


def test_waiting_counts_as_generating_on_shared_gpus() -> None:
    goodput = Goodput.from_counters(
        {"trainer/waiting": 3.0, "trainer/training": 1.0}, {}, 1, colocated=True
    )
    assert goodput.ratio == 1.0
    assert goodput.text() == "100% (0.00111 device hours: 75% generated, 25% trained)"


def test_goodput_is_zero_before_any_work() -> None:
    assert Goodput.from_counters({}, {}, 0, colocated=False).ratio == 0.0


def test_a_new_rendezvous_counts_from_zero() -> None:
    device_seconds = DeviceSeconds()
    for answer in ({"trainer/training": 5.0}, {"trainer/training": 8.0}, {"trainer/waiting": 1.0}):
        device_seconds.add(answer)
    assert device_seconds.total() == {"trainer/training": 8.0, "trainer/waiting": 1.0}
