"""A job misses pods once all of a gang were seen, and one is not there."""

from __future__ import annotations

from sluice_operator.plan.decide.gangs import lacks_pods
from tests.unit.operator.world import World, make_job, settled


def lacks(world: World) -> bool:
    job = world.job.model_copy(update={"status": world.status})
    return lacks_pods(job, list(world.pods.values()))


def test_a_job_that_was_never_planned_misses_none() -> None:
    assert not lacks(World(make_job()))


def test_a_job_with_all_its_pods_misses_none() -> None:
    assert not lacks(settled())


def test_a_pod_that_was_seen_and_is_not_there_is_missed() -> None:
    world = settled()
    world.vanish("demo-trainer-0-1-0")
    assert lacks(world)


def test_an_attempt_that_is_still_to_be_created_misses_none() -> None:
    world = settled()
    world.end("demo-trainer-0-1-0", 1)
    world.step()
    world.remove_terminating()
    assert world.names("trainer") == []
    assert not lacks(world)


def test_a_suspended_job_misses_none() -> None:
    world = settled()
    world.job = world.job.model_copy(
        update={"spec": world.job.spec.model_copy(update={"suspend": True})}
    )
    world.pods.clear()
    assert not lacks(world)


def test_a_job_that_has_ended_misses_none() -> None:
    world = settled(failurePolicy={"maxRestarts": 0})
    world.end("demo-trainer-0-1-0", 1)
    world.settle()
    assert world.status.is_true("Failed")
    world.pods.clear()
    assert not lacks(world)
