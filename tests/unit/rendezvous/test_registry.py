"""The rendezvous' decisions: epochs, generations, who may work, who is refused."""

from __future__ import annotations

import pytest

from sluice.weight_store.manifest import VersionId
from sluice_rendezvous.registry import (
    MemberEntry,
    Registry,
    StaleAttemptError,
)


def engine(name: str = "rollout-0", attempt: int = 1, version: int = -1) -> MemberEntry:
    return MemberEntry("rollout", name, attempt, 0, "127.0.0.1:1", version=version)


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_an_engine_works_only_once_it_holds_the_weights(registry: Registry) -> None:
    entry = registry.join(engine(), 0.0)
    assert not entry.admitted
    [planned] = registry.begin_update("trainer-0", 1, 5, joiners_only=False)
    assert registry.joiners(5) == [entry]
    assert registry.report(planned.name, 1, planned.generation, "") is entry
    registry.serve(planned, 5)
    assert entry.admitted
    assert registry.joiners(5) == []


def test_a_failed_engine_leaves_the_epoch_and_gets_a_new_generation(registry: Registry) -> None:
    entry = registry.join(engine(), 0.0)
    epoch, generation = registry.epoch, entry.generation
    assert registry.report(entry.name, 1, generation, "transfer: engine died") is None
    assert registry.epoch == epoch + 1
    assert entry.generation > generation
    assert (entry.admitted, entry.dropped) == (False, "transfer: engine died")
    assert registry.begin_update("trainer-0", 1, 5, joiners_only=True) == [entry]


def test_a_report_about_an_older_communicator_is_ignored(registry: Registry) -> None:
    first = registry.join(engine(), 0.0).generation
    entry = registry.join(engine(), 0.0)
    assert registry.report(entry.name, 1, first, "late news") is None
    assert entry.dropped == ""


def test_joiners_only_leaves_those_in_sync_alone(registry: Registry) -> None:
    held = registry.join(engine("rollout-0"), 0.0)
    registry.begin_update("trainer-0", 1, 3, joiners_only=False)
    registry.serve(held, 3)
    newcomer = registry.join(engine("rollout-1"), 0.0)
    assert registry.begin_update("trainer-0", 1, 3, joiners_only=True) == [newcomer]
    assert registry.begin_update("trainer-0", 1, 4, joiners_only=True) == [held, newcomer]


def test_after_a_restart_of_the_rendezvous_engines_go_on_with_what_they_hold(
    registry: Registry,
) -> None:
    assert registry.join(engine(version=7), 0.0).admitted
    registry.begin_update("trainer-0", 1, 8, joiners_only=False)
    assert not registry.join(engine("rollout-1", version=7), 0.0).admitted


def test_older_attempts_are_refused(registry: Registry) -> None:
    registry.join(engine(attempt=2), 0.0)
    with pytest.raises(StaleAttemptError, match="attempt 1 was replaced by attempt 2"):
        registry.join(engine(attempt=1), 0.0)
    registry.begin_update("trainer-0", 3, 1, joiners_only=False)
    with pytest.raises(StaleAttemptError):
        registry.begin_update("trainer-0", 2, 2, joiners_only=False)


def test_silence_is_death(registry: Registry) -> None:
    entry = registry.join(engine(), 0.0)
    entry.last_heartbeat = 8.0
    assert registry.expire(17.0, timeout=10.0) == []
    assert registry.expire(19.0, timeout=10.0) == [entry]
    assert registry.members() == []


def test_the_end_of_a_lost_stream_does_not_remove_its_successor(registry: Registry) -> None:
    old = registry.join(engine(), 0.0)
    entry = registry.join(engine(), 0.0)
    assert not registry.leave(old)
    assert registry.members() == [entry]


def test_generations_never_repeat(registry: Registry) -> None:
    seen = [registry.join(engine(), 0.0).generation for _ in range(5)]
    assert len(set(seen)) == 5


def test_generations_of_a_restarted_service_are_others_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    before = {Registry().join(engine(), 0.0).generation for _ in range(3)}
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0 - 3600)
    assert len(before) == 3
    assert Registry().join(engine(), 0.0).generation not in before


def test_an_engine_brings_the_attempts_of_trainers_that_it_has_heard_of(registry: Registry) -> None:
    registry.join(engine(), 0.0, {"trainer-0": 3})
    with pytest.raises(StaleAttemptError, match="attempt 2 was replaced by attempt 3"):
        registry.begin_update("trainer-0", 2, 5, joiners_only=False)
    registry.begin_update("trainer-0", 4, 5, joiners_only=False)
    registry.join(engine("rollout-1"), 0.0, {"trainer-0": 3})
    assert registry.sources == {"trainer-0": 4}


def test_the_more_members_the_fewer_heartbeats_of_each(registry: Registry) -> None:
    registry.join(engine(), 0.0)
    assert registry.heartbeat_seconds == 2.0
    for number in range(1000):
        registry.join(engine(f"rollout-{number}"), 0.0)
    assert registry.heartbeat_seconds == 16.0


def test_who_was_told_to_send_fewer_heartbeats_may_be_silent_for_longer(registry: Registry) -> None:
    entry = registry.join(engine(), 0.0)
    entry.heartbeat_seconds = 8.0
    assert registry.expire(40.0, timeout=10.0) == []
    assert registry.expire(41.0, timeout=10.0) == [entry]


def test_an_engine_of_a_store_works_with_what_it_has_loaded(registry: Registry) -> None:
    entry = registry.join(engine(), 0.0)
    registry.publish("trainer-0", 1, 5)
    assert not entry.admitted
    registry.load(entry, VersionId(4, 1))
    assert (entry.admitted, entry.version) == (True, 4)
    assert registry.joiners(5) == [entry]
    registry.load(entry, VersionId(-1, 0))
    assert (entry.admitted, entry.version) == (False, -1)


def test_weights_of_a_trainer_that_was_replaced_are_no_longer_used(registry: Registry) -> None:
    entry = registry.join(engine(), 0.0)
    registry.publish("trainer-0", 1, 5)
    registry.load(entry, VersionId(5, 1))
    registry.publish("trainer-0", 2, 3)
    assert (entry.admitted, entry.version) == (False, -1)
    with pytest.raises(StaleAttemptError):
        registry.publish("trainer-0", 1, 6)
    assert registry.published == (3, 2)
    registry.load(entry, VersionId(3, 2))
    assert (entry.admitted, entry.version) == (True, 3)


def test_after_a_restart_an_engine_of_a_store_keeps_its_version_until_the_trainer_tells(
    registry: Registry,
) -> None:
    entry = registry.join(engine(version=4), 0.0)
    registry.load(entry, VersionId(4, 1))
    assert (entry.admitted, entry.version) == (True, 4)
    registry.publish("trainer-0", 1, 5)
    assert (entry.admitted, entry.version) == (True, 4)
