"""Memory of messages under way."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.api.schema.capacity_rules import budget_bytes, largest_group
from sluice_buffer.serving.budget import Budget

MIB = 1 << 20


@pytest.mark.parametrize(
    ("memory", "budget"),
    [
        pytest.param(2048, 1329, id="default"),
        pytest.param(256, 64, id="tiny"),
        pytest.param(8192, 6055, id="large"),
    ],
)
def test_what_a_pod_may_have_under_way(memory: int, budget: int) -> None:
    assert budget_bytes(memory * MIB) // MIB == budget


def test_one_group_may_take_half() -> None:
    assert largest_group(100 * MIB) == 50 * MIB
    assert largest_group(1 << 40) == (2 << 30) - 1


@given(st.lists(st.integers(0, 15), max_size=30), st.randoms())
def test_the_limit_holds_and_nobody_waits_for_ever(sizes: list[int], random: object) -> None:
    async def run() -> None:
        budget = Budget(10)

        async def reserve(size: int) -> None:
            async with budget.reserved(size):
                assert budget.used <= 10
                await asyncio.sleep(0)

        async with asyncio.timeout(10):
            await asyncio.gather(*map(reserve, sizes))
        assert budget.used == 0

    asyncio.run(run())


async def test_who_waits_is_served_in_order_and_may_give_up() -> None:
    budget = Budget(10)
    await budget.reserve(8)
    first, second = asyncio.create_task(budget.reserve(5)), asyncio.create_task(budget.reserve(1))
    await asyncio.sleep(0)
    assert not second.done(), "it would fit, but another came before"
    first.cancel()
    await second
    assert budget.used == 9
    budget.free(8)
    budget.free(1)
    assert budget.used == 0


async def test_room_that_comes_to_a_waiter_that_gives_up_is_not_lost() -> None:
    budget = Budget(10)
    await budget.reserve(10)
    waiting = asyncio.create_task(budget.reserve(10))
    await asyncio.sleep(0)
    budget.free(10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.used == 0
