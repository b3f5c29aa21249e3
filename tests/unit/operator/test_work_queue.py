"""The work queue: de-duplication, back-off, delays, one worker per key."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from sluice_operator.metrics import QueueMetrics
from sluice_operator.work_queue import WorkQueue


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def queue(clock: Clock, registry: CollectorRegistry) -> WorkQueue[str]:
    return WorkQueue(QueueMetrics(registry), clock)


async def ready(queue: WorkQueue[str]) -> str | None:
    """Return the next key; None if no key is ready."""
    try:
        async with asyncio.timeout(0.02):
            return await queue.get()
    except TimeoutError:
        return None


async def test_a_key_added_many_times_is_worked_on_once(queue: WorkQueue[str]) -> None:
    for key in "abab":
        queue.add(key)
    assert [await ready(queue) for _ in range(3)] == ["a", "b", None]


async def test_a_key_added_while_it_is_worked_on_comes_back_only_after_that(
    queue: WorkQueue[str],
) -> None:
    queue.add("a")
    assert await ready(queue) == "a"
    queue.add("a")
    queue.add("a")
    assert await ready(queue) is None
    queue.done("a")
    assert await ready(queue) == "a"


async def test_a_delayed_key_comes_when_it_is_due(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add_after("a", 10)
    assert await ready(queue) is None
    clock.now = 10
    assert await ready(queue) == "a"


async def test_the_earliest_of_several_delays_counts(queue: WorkQueue[str], clock: Clock) -> None:
    for seconds in (10, 5, 20):
        queue.add_after("a", seconds)
    clock.now = 5
    assert await ready(queue) == "a"
    queue.done("a")
    clock.now = 30
    assert await ready(queue) is None


async def test_an_addition_makes_a_delay_void(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add_after("a", 5)
    queue.add("a")
    assert await ready(queue) == "a"
    queue.done("a")
    clock.now = 5
    assert await ready(queue) is None


async def test_a_delay_set_while_the_key_is_worked_on_is_kept(
    queue: WorkQueue[str], clock: Clock
) -> None:
    queue.add("a")
    await ready(queue)
    queue.add("a")
    queue.add_after("a", 5)
    queue.done("a")
    assert await ready(queue) == "a"
    queue.done("a")
    clock.now = 5
    assert await ready(queue) == "a"


def test_back_off_doubles_up_to_a_limit_and_starts_anew_after_success(
    queue: WorkQueue[str],
) -> None:
    assert [queue.retry("a") for _ in range(4)] == [0.1, 0.2, 0.4, 0.8]
    assert [queue.retry("a") for _ in range(40)][-1] == 300
    assert queue.retry("a", at_most=30) == 30
    queue.succeeded("a")
    assert queue.retry("a") == 0.1


def test_the_server_may_ask_for_more_patience(queue: WorkQueue[str]) -> None:
    assert queue.retry("a", at_least=7) == 7


async def test_a_forgotten_key_does_not_come_back(queue: WorkQueue[str], clock: Clock) -> None:
    queue.retry("a")
    queue.forget("a")
    clock.now = 400
    assert await ready(queue) is None


async def test_get_wakes_when_a_key_is_added() -> None:
    queue: WorkQueue[str] = WorkQueue(QueueMetrics(CollectorRegistry()))
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add_after("a", 0.01)
    assert await asyncio.wait_for(waiting, 1) == "a"


async def test_metrics(queue: WorkQueue[str], clock: Clock, registry: CollectorRegistry) -> None:
    def value(name: str) -> float | None:
        return registry.get_sample_value(f"workqueue_{name}", {"name": "rljob"})

    queue.add("a")
    queue.add("a")
    assert (value("depth"), value("adds_total")) == (1, 1)
    clock.now = 2
    await ready(queue)
    clock.now = 5
    queue.done("a")
    queue.retry("a")
    assert (value("depth"), value("retries_total")) == (0, 1)
    assert (value("queue_duration_seconds_sum"), value("work_duration_seconds_sum")) == (2, 3)
