"""The load of a worker, and the tail of a batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice.samples.sample import Prompt, Sample
from sluice_rollout import worker as worker_module
from sluice_rollout.load import GROUP_LOAD, GroupLoad, Load, is_tail
from tests.unit.rollout.test_hooks import Parts, maker


@pytest.mark.parametrize(
    ("samples", "peak", "waits", "tail"),
    [
        pytest.param(15, 64, True, True, id="few are left"),
        pytest.param(16, 64, True, False, id="a quarter is no tail yet"),
        pytest.param(15, 64, False, False, id="more groups are about to come"),
        pytest.param(64, 64, True, False, id="the whole batch"),
        pytest.param(0, 64, True, True, id="only rewards are left"),
        pytest.param(1, 4, True, False, id="one of four"),
        pytest.param(0, 0, True, False, id="nothing was done yet"),
    ],
)
def test_a_tail_has_few_samples_and_no_more_groups_to_lease(
    samples: int, peak: int, waits: bool, tail: bool
) -> None:
    assert is_tail(samples, peak, waiting=waits) is tail


@dataclass
class Worker:
    """A worker's load, with a clock that is set by hand."""

    batches: bool = True
    time: float = 0.0
    running: list[GroupLoad] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.load = Load(self.batches, clock=lambda: self.time)

    def lease(self, count: int) -> None:
        """A lease call that is answered with groups of so many samples, and the next call."""
        self.load.note_lease(waiting=True)
        self.load.note_lease(waiting=False)
        self.running += [self.load.add_group(1) for _ in range(count)]
        self.load.note_lease(waiting=True)

    def finish(self, count: int) -> None:
        for _ in range(count):
            self.running.pop().done(1)

    @property
    def state(self) -> str:
        return self.load.state(has_groups=bool(self.running))


def test_a_batch_is_generated_then_its_tail_and_the_next_begins_anew() -> None:
    worker = Worker()
    assert worker.state == "idle"
    worker.lease(64)
    assert worker.state == "generating"
    worker.finish(48)
    assert (worker.state, worker.load.tail_seconds) == ("generating", 0.0)
    worker.finish(1)
    worker.time = 5.0
    assert (worker.state, worker.load.tail_seconds) == ("tail", 5.0)
    worker.finish(15)
    assert worker.state == "idle"
    worker.lease(8)
    assert worker.state == "generating", "eight are all of this batch"


def test_the_last_rewards_are_the_tail_too() -> None:
    worker = Worker()
    worker.lease(8)
    worker.finish(8)
    assert worker.load.state(has_groups=True) == "tail"


def test_enough_groups_in_place_of_filtered_ones_end_a_tail() -> None:
    worker = Worker()
    worker.lease(64)
    worker.finish(60)
    worker.lease(8)
    assert worker.state == "tail", "12 of 64"
    worker.lease(8)
    assert worker.state == "generating", "20 of 64"


def test_a_worker_without_free_places_is_not_in_a_tail() -> None:
    """It asks for no lease: stragglers hold its places, while the batch has more to lease."""
    worker = Worker()
    worker.lease(64)
    worker.load.note_lease(waiting=False)
    worker.finish(60)
    assert worker.state == "generating"


def test_asynchronous_mode_has_no_tail() -> None:
    """A trainer that lags behind uses up the staleness that samples may have: the worker waits
    with few samples, and no step waits for them.
    """
    worker = Worker(batches=False)
    worker.lease(192)
    for _ in range(20):
        worker.finish(min(70, len(worker.running)))
        assert worker.state in ("generating", "idle")
        worker.lease(64)
        assert worker.state == "generating"


def test_episodes_whose_tools_run_are_not_a_tail() -> None:
    """They have no request at the engine, and will have some."""
    load = Load()
    load.add_group(64)
    load.note_lease(waiting=True)
    assert load.state(has_groups=True) == "generating"


async def test_a_sample_is_counted_until_it_is_generated_and_not_while_it_is_scored() -> None:
    counts: list[int] = []

    class Counts(Parts):
        async def generator(self, ids: list[int], sample: Sample, params: dict[str, Any]) -> Sample:
            await asyncio.sleep(0)  # until all have begun
            counts.append(load.samples)
            return await super().generator(ids, sample, params)

        def judge(self, reward: float) -> Any:
            inner = super().judge(reward)

            async def judge(inputs: list[Any]) -> list[Any]:
                counts.append(load.samples)
                return cast("list[Any]", await inner(inputs))

            return judge

    load = Load()
    GROUP_LOAD.set(load.add_group(5))
    await maker(Counts()).make(Prompt(0, "2+2"), [])
    assert counts[:2] == [2, 2], "as many as the group has"
    assert (counts[-1], load.samples) == (0, 0)


async def test_a_change_of_state_is_reported_once_and_soon() -> None:
    beats: asyncio.Queue[None] = asyncio.Queue()
    nothing = cast("Any", None)
    membership = cast("Any", SimpleNamespace(interval=0.01, beat=lambda: beats.put_nowait(None)))
    health = SimpleNamespace(unhealthy="")
    make = cast("Any", SimpleNamespace(generator=SimpleNamespace(health=health)))
    worker = worker_module.Worker(nothing, nothing, make, nothing, nothing, membership)
    telling = asyncio.create_task(worker._report_state())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        worker.leased_groups["one"] = nothing
        share = worker.load.add_group(8)
        worker.load.note_lease(waiting=True)
        await beats.get()
        assert worker.state == "generating"
        share.done(7)
        await beats.get()
        assert worker.state == "tail"
        health.unhealthy = "/health: no answer"
        await beats.get()
        assert worker.state == "unresponsive"
        health.unhealthy = ""
        await beats.get()
        worker.leased_groups.clear()
        await beats.get()
        assert worker.state == "idle"
    assert beats.empty()
    telling.cancel()


def room(places: int, size: int, open_samples: list[int]) -> int:
    """Groups that a worker with these many samples still to generate of each group asks for."""
    nothing = cast("Any", None)
    rollout = SimpleNamespace(samples_at_once=places, samples_per_prompt=size)
    spec = cast("Any", SimpleNamespace(rollout=rollout))
    worker = worker_module.Worker(spec, nothing, nothing, nothing, nothing, nothing)
    for number, left in enumerate(open_samples):
        worker.load.add_group(left)
        worker.leased_groups[str(number)] = nothing
    return worker._groups_that_fit()


@pytest.mark.parametrize(
    ("open_samples", "groups"),
    [
        pytest.param([], 8, id="none yet"),
        pytest.param([8] * 8, 0, id="every place is taken"),
        pytest.param([1] * 8, 7, id="one long response of each group holds one place, not eight"),
        pytest.param([8] * 7 + [1], 1, id="a part of a group's places is enough"),
        pytest.param([0] * 20, 8, id="what is scored needs no place"),
        pytest.param([0] * 31, 1, id="rewards lag behind"),
        pytest.param([0] * 32, 0, id="rewards hold the engine back"),
    ],
)
def test_a_sample_has_its_place_until_it_is_generated(open_samples: list[int], groups: int) -> None:
    assert room(64, 8, open_samples) == groups


def test_fewer_places_than_a_group_has_samples_are_enough() -> None:
    assert room(4, 8, []) == 1
    assert room(4, 8, [4]) == 0


async def test_a_generated_sample_wakes_the_leasing_loop() -> None:
    load = Load()
    share = load.add_group(8)
    load.decreased.clear()
    share.done(1)
    assert load.decreased.is_set()
