"""All workers that ask share a step's groups, and they do not wait for one that is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_buffer.group import TRAINING, GroupKey
from sluice_buffer.rules.admission import fair_share
from sluice_buffer.serving.lease_queue import QUIET_SECONDS, SHARE_SECONDS, LeaseQueue
from tests.unit.buffer.buffer_tools import Clock, LocalBuffer

MakeBuffer = Callable[..., LocalBuffer]
BATCH = 8


@pytest.mark.parametrize(
    ("room", "available", "workers", "rooms", "groups"),
    [
        pytest.param(64, 64, 1, 64, 64, id="one worker gets all"),
        pytest.param(64, 64, 2, 128, 32, id="each of two gets half"),
        pytest.param(32, 32, 2, 96, 0, id="who has its half leaves the rest to the other"),
        pytest.param(64, 32, 2, 96, 32, id="who gets the rest"),
        pytest.param(64, 64, 3, 192, 22, id="rounded up"),
        pytest.param(32, 8, 1000, 32000, 1, id="fewer groups than workers: one each"),
        pytest.param(4, 64, 2, 20, 4, id="no more than there is room for"),
        pytest.param(32, 20, 3, 36, 27, id="the emptiest gets the most"),
        pytest.param(2, 20, 3, 36, 0, id="the fullest nothing, where others are emptier"),
        pytest.param(32, 0, 3, 96, 0, id="of nothing"),
    ],
)
def test_a_workers_part(room: int, available: int, workers: int, rooms: int, groups: int) -> None:
    assert fair_share(room, available=available, workers=workers, free_total=rooms) == groups


@given(st.lists(st.integers(0, 300), min_size=1, max_size=50), st.integers(0, 2000))
def test_all_parts_together_leave_nothing(rooms: list[int], available: int) -> None:
    left, order = list(rooms), available
    for number, room in enumerate(rooms):
        groups = min(
            order, fair_share(room, available=order, workers=len(rooms), free_total=sum(left))
        )
        left[number] -= groups
        order -= groups
    assert order == max(0, available - sum(rooms))


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 64))
def test_equal_workers_get_equally_many(workers: int, batch: int, spare: int) -> None:
    room, available = batch + spare, batch
    rooms, sizes = workers * room, list[int]()
    for _ in range(workers):
        groups = min(
            available, fair_share(room, available=available, workers=workers, free_total=rooms)
        )
        rooms, available = rooms - groups, available - groups
        sizes.append(groups)
    assert sum(sizes) == batch
    assert max(sizes) == -(-batch // workers)


@dataclass
class Workers:
    """Workers that ask a buffer in this process."""

    buffer: LocalBuffer
    clock: Callable[[], float] = time.monotonic
    leasing: LeaseQueue = field(init=False)

    def __post_init__(self) -> None:
        self.lease_queue = LeaseQueue(self.buffer.core, self.clock)

    async def ask(
        self, worker: str, room: int = BATCH, version: int = 0, seconds: float = 10.0
    ) -> list[int]:
        """Ids of the groups that it gets."""

        async def run(transition: Callable[[], list[GroupKey]]) -> list[GroupKey]:
            keys = transition()
            self.buffer.sync()
            self.lease_queue.call_up()
            return keys

        keys = await self.lease_queue.lease(self.buffer.call(worker), room, version, seconds, run)
        return [key.group_id for key in keys]


@pytest.fixture
def workers(make_buffer: MakeBuffer) -> Workers:
    return Workers(make_buffer(rollout__batchSize=BATCH))


async def test_the_first_to_ask_leaves_the_others_their_part(workers: Workers) -> None:
    first = await workers.ask("rollout-0")
    assert len(first) == BATCH, "who is alone gets all"
    finish(workers, first)
    calls = [
        asyncio.create_task(workers.ask(name, version=0)) for name in ("rollout-0", "rollout-1")
    ]
    await asyncio.sleep(0.05)
    commit(workers, 1)
    assert [len(await call) for call in calls] == [0, 0], "newer weights are there"
    halves = [await workers.ask(name, version=1) for name in ("rollout-1", "rollout-0")]
    assert [len(half) for half in halves] == [BATCH / 2, BATCH / 2]


async def test_after_a_long_step_all_have_the_time_to_ask_again(make_buffer: MakeBuffer) -> None:
    slow = Workers(make_buffer(rollout__batchSize=BATCH), Clock())
    assert isinstance(slow.clock, Clock)
    finish(slow, await slow.ask("rollout-0"))
    calls = [asyncio.create_task(slow.ask(f"rollout-{number}")) for number in range(4)]
    await asyncio.sleep(0.05)
    slow.clock.now += 100 * QUIET_SECONDS
    commit(slow, 1)
    await asyncio.gather(*calls)
    slow.clock.now += QUIET_SECONDS / 2
    assert len(await slow.ask("rollout-0", version=1)) == BATCH / 4


async def test_who_comes_again_for_the_rest_waits_until_the_other_has_its_part(
    workers: Workers,
) -> None:
    await both_have_asked(workers)
    half = await workers.ask("rollout-0", version=1)
    again = asyncio.create_task(workers.ask("rollout-0", BATCH - len(half), version=1))
    await asyncio.sleep(QUIET_SECONDS / 4)
    assert not again.done()
    assert len(await workers.ask("rollout-1", version=1)) == BATCH / 2
    again.cancel()


async def test_nobody_waits_long_for_one_that_does_not_come(workers: Workers) -> None:
    await both_have_asked(workers)
    half = await workers.ask("rollout-0", version=1)
    rest = await asyncio.wait_for(
        workers.ask("rollout-0", BATCH - len(half), version=1), SHARE_SECONDS
    )
    assert len(half) + len(rest) == BATCH


async def test_nobody_waits_for_ever_for_one_that_asks_in_vain(make_buffer: MakeBuffer) -> None:
    slow = Workers(make_buffer(rollout__batchSize=BATCH), Clock())
    assert isinstance(slow.clock, Clock)
    await both_have_asked(slow)
    half = await slow.ask("rollout-0", version=1)
    again = asyncio.create_task(slow.ask("rollout-0", BATCH - len(half), version=1))
    await asyncio.sleep(0.05)
    slow.clock.now += SHARE_SECONDS
    assert await slow.ask("rollout-1", version=0) == [], "it does not hear of newer weights"
    assert len(half) + len(await again) == BATCH


async def test_one_that_breaks_off_does_not_count(workers: Workers) -> None:
    finish(workers, await workers.ask("rollout-0"))
    gone = asyncio.create_task(workers.ask("rollout-1"))
    await asyncio.sleep(0.05)
    gone.cancel()
    await asyncio.wait([gone])
    commit(workers, 1)
    assert len(await workers.ask("rollout-0", version=1)) == BATCH


async def test_a_full_one_that_gives_all_back_does_not_count(workers: Workers) -> None:
    for group_id in await workers.ask("rollout-0", BATCH):
        release(workers, group_id)
    assert len(await workers.ask("rollout-1", BATCH)) == BATCH


async def test_the_emptier_engine_gets_more(workers: Workers) -> None:
    await both_have_asked(workers, rooms=(2, BATCH))
    sizes = {
        name: len(await workers.ask(name, room, version=1))
        for name, room in (("rollout-0", 2), ("rollout-1", BATCH))
    }
    assert sizes == {"rollout-0": 1, "rollout-1": BATCH - 1}


async def test_where_places_are_few_the_faster_engine_makes_more(workers: Workers) -> None:
    await both_have_asked(workers, rooms=(2, 2))
    slow = await workers.ask("rollout-0", 2, version=1)
    fast = await workers.ask("rollout-1", 2, version=1)
    assert (len(slow), len(fast)) == (2, 2)
    of_fast = len(fast)
    for _ in range(2):
        finish(workers, fast)
        asking = workers.ask("rollout-1", 2, version=1)
        fast = await asyncio.wait_for(asking, QUIET_SECONDS / 2)
        of_fast += len(fast)
    assert of_fast == BATCH - len(slow)


async def test_who_has_most_room_is_called_up_first(workers: Workers) -> None:
    groups = await workers.ask("rollout-0")
    full = asyncio.create_task(workers.ask("rollout-1", 1))
    empty = asyncio.create_task(workers.ask("rollout-2", BATCH))
    await asyncio.sleep(0.05)
    release(workers, groups[0])
    workers.lease_queue.call_up()
    assert await empty == [groups[0]]
    assert not full.done()
    full.cancel()


async def both_have_asked(workers: Workers, rooms: tuple[int, int] = (BATCH, BATCH)) -> None:
    """A step is over, and both were answered that newer weights are there."""
    finish(workers, await workers.ask("rollout-0"))
    calls = [
        asyncio.create_task(workers.ask(f"rollout-{number}", room))
        for number, room in enumerate(rooms)
    ]
    await asyncio.sleep(0.05)
    commit(workers, 1)
    await asyncio.gather(*calls)


def finish(workers: Workers, groups: list[int]) -> None:
    """Submit what was leased."""
    for group_id in groups:
        workers.buffer.submit(workers.buffer.arrived(GroupKey(TRAINING, group_id)))


def commit(workers: Workers, step: int) -> None:
    workers.buffer.step(step)
    workers.lease_queue.call_up()


def release(workers: Workers, group_id: int) -> None:
    """The group comes back unfinished."""
    workers.buffer.give_back(workers.buffer.arrived(GroupKey(TRAINING, group_id)))
