"""When a worker is in the tail of a batch."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice.sample import Prompt, Sample
from sluice_rollout import worker as worker_module
from sluice_rollout.load import Load, is_tail
from tests.unit.rollout.test_hooks import House, maker


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
def test_few_samples_and_no_more_to_be_had(
    samples: int, peak: int, waits: bool, tail: bool
) -> None:
    assert is_tail(samples, peak, waits=waits) is tail


@dataclass
class Worker:
    """A worker's load, with a clock that is set by hand."""

    batches: bool = True
    time: float = 0.0
    running: list[ExitStack] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.load = Load(self.batches, clock=lambda: self.time)

    def lease(self, count: int) -> None:
        """A lease call that is answered with groups of so many samples, and the next call."""
        self.load.leasing(waits=True)
        self.load.leasing(waits=False)
        for _ in range(count):
            stack = ExitStack()
            stack.enter_context(self.load.generating(1))
            self.running.append(stack)
        self.load.leasing(waits=True)

    def finish(self, count: int) -> None:
        for _ in range(count):
            self.running.pop().close()

    @property
    def state(self) -> str:
        return self.load.state(work=bool(self.running))


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
    assert worker.load.state(work=True) == "tail"


def test_groups_in_place_of_filtered_ones_end_a_tail_where_they_are_many() -> None:
    worker = Worker()
    worker.lease(64)
    worker.finish(60)
    worker.lease(8)
    assert worker.state == "tail", "12 of 64"
    worker.lease(8)
    assert worker.state == "generating", "20 of 64"


def test_a_worker_whose_places_are_all_taken_is_in_no_tail() -> None:
    """It asks for no lease: stragglers hold its places, while the batch has more to lease."""
    worker = Worker()
    worker.lease(64)
    worker.load.leasing(waits=False)
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


def test_episodes_whose_tools_run_are_no_tail() -> None:
    """They have no request at the engine, and will have some."""
    load = Load()
    with load.generating(64):
        load.leasing(waits=True)
        assert load.state(work=True) == "generating"


async def test_a_sample_is_counted_until_it_is_generated_and_not_while_it_is_scored() -> None:
    counts: list[int] = []

    class Counts(House):
        async def generator(self, ids: list[int], sample: Sample, params: dict[str, Any]) -> Sample:
            await asyncio.sleep(0)  # until all have begun
            counts.append(make.load.samples)
            return await super().generator(ids, sample, params)

        def judge(self, reward: float) -> Any:
            inner = super().judge(reward)

            async def judge(inputs: list[Any]) -> list[Any]:
                counts.append(make.load.samples)
                return cast("list[Any]", await inner(inputs))

            return judge

    make = maker(Counts())
    await make(Prompt(0, "2+2"), [])
    assert counts[:2] == [2, 2]
    assert (counts[-1], make.load.samples, make.load.peak) == (0, 0, 2)


async def test_a_change_of_state_is_told_once_and_soon() -> None:
    beats: asyncio.Queue[None] = asyncio.Queue()
    load, nothing = Load(), cast("Any", None)
    membership = SimpleNamespace(interval=0.01, beat=lambda: beats.put_nowait(None))
    worker = worker_module.Worker(
        nothing, nothing, cast("Any", SimpleNamespace(load=load)), nothing, nothing,
        cast("Any", membership), nothing, nothing,
    )  # fmt: skip
    telling = asyncio.create_task(worker._tell_state())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        worker.work["one"] = nothing
        with load.generating(8):
            load.leasing(waits=True)
            await beats.get()
            assert worker.state == "generating"
        await beats.get()
        assert worker.state == "tail"
        worker.work.clear()
        await beats.get()
        assert worker.state == "idle"
    assert beats.empty()
    telling.cancel()
