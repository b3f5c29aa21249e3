"""The rendezvous' decisions: epochs, generations, who may work, who is refused."""

from __future__ import annotations

import pytest

from sluice_rendezvous.registry import Entry, Registry, StaleAttemptError


def engine(name: str = "rollout-0", attempt: int = 1, version: int = -1) -> Entry:
    return Entry("rollout", name, attempt, 0, "127.0.0.1:1", version=version)


@pytest.fixture
def registry() -> Registry:
    return Registry(first_generation=1000)


def test_an_engine_works_only_once_it_holds_the_weights(registry: Registry) -> None:
    entry = registry.join(engine(), 0.0)
    assert not entry.admitted
    [planned] = registry.begin_update("trainer-0", 1, 5, joiners_only=False)
    assert registry.report(planned.key, 1, planned.generation, "")
    registry.serve(planned.key, 5)
    assert entry.admitted
    assert registry.in_sync() == ["rollout-0"]


def test_a_failed_engine_leaves_the_epoch_and_gets_a_new_generation(registry: Registry) -> None:
    entry = registry.join(engine(), 0.0)
    epoch, generation = registry.epoch, entry.generation
    assert not registry.report(entry.key, 1, generation, "transfer: engine died")
    assert registry.epoch == epoch + 1
    assert entry.generation > generation
    assert (entry.admitted, entry.dropped) == (False, "transfer: engine died")
    assert registry.begin_update("trainer-0", 1, 5, joiners_only=True) == [entry]


def test_a_report_about_an_older_communicator_is_ignored(registry: Registry) -> None:
    first = registry.join(engine(), 0.0).generation
    entry = registry.join(engine(), 0.0)
    assert not registry.report(entry.key, 1, first, "late news")
    assert entry.dropped == ""


def test_joiners_only_leaves_those_in_sync_alone(registry: Registry) -> None:
    held = registry.join(engine("rollout-0"), 0.0)
    registry.begin_update("trainer-0", 1, 3, joiners_only=False)
    registry.serve(held.key, 3)
    newcomer = registry.join(engine("rollout-1"), 0.0)
    assert registry.begin_update("trainer-0", 1, 3, joiners_only=True) == [newcomer]
    assert registry.begin_update("trainer-0", 1, 4, joiners_only=True) == [held, newcomer]


def test_after_a_restart_of_the_rendezvous_engines_go_on_with_what_they_hold(registry: Registry) -> None:
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
    registry.heartbeat(entry.key, entry.connection, 8.0, "idle", 0, {})
    assert registry.expire(17.0, timeout=10.0) == []
    assert registry.expire(19.0, timeout=10.0) == [entry]
    assert registry.members() == []


def test_the_end_of_a_lost_stream_does_not_remove_its_successor(registry: Registry) -> None:
    old = registry.join(engine(), 0.0).connection
    entry = registry.join(engine(), 0.0)
    assert not registry.leave(entry.key, old)
    assert registry.members() == [entry]


def test_generations_never_repeat(registry: Registry) -> None:
    seen = [registry.join(engine(), 0.0).generation for _ in range(5)]
    assert len(set(seen)) == 5
    assert min(seen) > 1000
