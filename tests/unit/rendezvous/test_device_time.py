import pytest

from sluice_rendezvous.device_time import DeviceTime
from sluice_rendezvous.registry import MemberEntry


def trainer(attempt: int = 1, *, devices: int = 4, index: int = 0, **fields: float) -> MemberEntry:
    entry = MemberEntry("trainer", "trainer-0", attempt, index, "here:1", devices=devices)
    entry.starting_seconds = fields.get("starting_seconds", 0.0)
    return entry


def in_state(entry: MemberEntry, state: str) -> MemberEntry:
    entry.state = state
    return entry


def test_a_state_holds_until_the_next_is_told() -> None:
    time, member = DeviceTime(), trainer(starting_seconds=2.0)
    time.join(member, 0.0)
    time.state(in_state(member, "waiting"), 3.0)
    time.state(in_state(member, "training"), 5.0)
    assert time.seconds(6.0) == {
        ("trainer", "starting"): 4 * 5.0,
        ("trainer", "waiting"): 4 * 2.0,
        ("trainer", "training"): 4 * 1.0,
    }


def test_only_the_first_pod_of_a_gang_is_counted() -> None:
    time = DeviceTime()
    time.join(trainer(index=1), 0.0)
    time.join(trainer(devices=0), 0.0)
    assert time.seconds(9.0) == {}


def test_a_gang_that_comes_again_was_restarting_until_it_works() -> None:
    time, first = DeviceTime(), trainer()
    time.join(first, 0.0)
    time.state(in_state(first, "training"), 0.0)
    time.leave(first, 10.0)
    assert time.seconds(20.0) == {("trainer", "starting"): 0.0, ("trainer", "training"): 40.0}
    second = trainer(attempt=2)
    time.join(second, 16.0)
    time.state(in_state(second, "starting"), 17.0)
    time.state(in_state(second, "waiting"), 20.0)
    assert time.seconds(20.0)["trainer", "restarting"] == pytest.approx(4 * 10.0)


def test_one_that_lost_its_stream_alone_went_on() -> None:
    time, member = DeviceTime(), trainer()
    time.join(member, 0.0)
    time.state(in_state(member, "training"), 0.0)
    time.leave(member, 4.0)
    time.join(trainer(), 5.0)
    assert time.seconds(6.0)["trainer", "training"] == pytest.approx(4 * 6.0)
    assert ("trainer", "restarting") not in time.seconds(6.0)


def test_one_that_was_told_to_go_is_not_missed() -> None:
    time, engine = DeviceTime(), MemberEntry("rollout", "rollout-3", 1, 0, "here:1", devices=1)
    time.join(engine, 0.0)
    time.state(in_state(engine, "draining"), 1.0)
    time.leave(engine, 2.0)
    again = MemberEntry("rollout", "rollout-3", 2, 0, "here:1", devices=1)
    time.join(again, 1000.0)
    assert time.seconds(1000.0)["rollout", "restarting"] == 0.0


def test_an_engine_in_an_update_synchronises() -> None:
    time, engine = DeviceTime(), MemberEntry("rollout", "rollout-0", 1, 0, "here:1", devices=1)
    time.join(engine, 0.0)
    engine.state, engine.synchronising = "generating", True
    time.state(engine, 1.0)
    engine.synchronising = False
    time.state(engine, 4.0)
    assert time.seconds(9.0) == {
        ("rollout", "starting"): 1.0,
        ("rollout", "synchronising"): 3.0,
        ("rollout", "generating"): 5.0,
    }
