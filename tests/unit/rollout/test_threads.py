"""Calls of user functions in threads, of which a hanging one keeps only its own."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator

import pytest

from sluice.samples.sample import SampleStatus
from sluice_rollout import metrics
from sluice_rollout.tools import ToolCall, ToolLoop, ToolUnavailableError
from sluice_rollout.user_functions.threads import LateError, NoThreadError, Threads, UserExitError
from tests.unit.rollout.test_tools import played
from tests.unit.rollout.test_tools import tokenizer as tokenizer

CALL = '<tool_call>{"name": "hang", "arguments": {}}</tool_call>'


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Calls that hang do so until this is set."""
    gate = threading.Event()
    yield gate
    gate.set()


async def settled(threads: Threads) -> None:
    async with asyncio.timeout(10):
        while threads.hanging.total():
            await asyncio.sleep(0.01)


async def test_a_hanging_call_does_not_keep_its_place(gate: threading.Event) -> None:
    threads = Threads("test", size=1, most_hanging=3)
    for _ in range(2):
        with pytest.raises(LateError, match=r"no end after 0\.02 s"):
            await threads.call(gate.wait, seconds=0.02)
    assert await threads.call(lambda: 7, seconds=10) == 7
    assert metrics.HANGING_CALLS.labels(pool="test")._value.get() == 2
    gate.set()
    await settled(threads)
    assert metrics.HANGING_CALLS.labels(pool="test")._value.get() == 0


async def test_beyond_the_bound_no_call_is_begun_until_one_has_ended(gate: threading.Event) -> None:
    def search() -> None:
        gate.wait()

    threads = Threads("test", size=1, most_hanging=2)  # of more, some would begin at once
    calls = [threads.call(search, seconds=0.02) for _ in range(4)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [LateError] * 2 + [NoThreadError] * 2
    with pytest.raises(
        NoThreadError, match=r"^2 calls hang, and no more are begun .*: search \(2\)$"
    ):
        await threads.call(lambda: 7, seconds=10)
    gate.set()
    await settled(threads)
    assert await threads.call(lambda: 7, seconds=10) == 7


async def test_an_abandoned_call_counts_as_hanging(
    gate: threading.Event,
) -> None:
    threads = Threads("test")
    call = asyncio.create_task(threads.call(gate.wait, seconds=100))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    assert threads.hanging == {"wait": 1}


async def test_the_wait_for_a_place_does_not_count_for_the_time_limit(
    gate: threading.Event,
) -> None:
    threads = Threads("test", size=1)
    first = asyncio.create_task(threads.call(gate.wait, seconds=100))
    second = asyncio.create_task(threads.call(lambda: 7, seconds=5))
    _, waiting = await asyncio.wait({first, second}, timeout=0.05)
    assert waiting == {first, second}
    gate.set()
    assert await second == 7


def leaves() -> None:
    sys.exit("enough")


async def leaves_later() -> None:
    sys.exit("enough")


def disappointed() -> None:
    raise TimeoutError("its own")


@pytest.mark.parametrize("function", [leaves, leaves_later], ids=["leaves", "leaves_later"])
async def test_a_function_that_ends_the_process_ends_its_call(function: object) -> None:
    with pytest.raises(UserExitError, match="SystemExit: enough"):
        await Threads("test").call(function, seconds=10)  # type: ignore[arg-type]


async def test_a_timeout_of_the_function_is_not_a_late_error() -> None:
    with pytest.raises(TimeoutError, match="its own") as caught:
        await Threads("test").call(disappointed, seconds=10)
    assert not isinstance(caught.value, LateError)


async def test_a_tool_that_cannot_be_called_fails_the_sample(
    gate: threading.Event, tokenizer: object
) -> None:
    def hang() -> None:
        gate.wait()

    loop = ToolLoop([hang], seconds=0.02, threads=Threads("test", size=1, most_hanging=1))
    answer = await loop._answer(ToolCall("hang"), loop._opened())
    assert answer == "error: no answer after 0.02 s"
    sample, _ = await played(loop, tokenizer, CALL, "it is 3")
    assert sample.status is SampleStatus.FAILED
    assert sample.trainable_tokens == 0
    assert sample.error.startswith("mine.py:play raised ToolUnavailableError: hang: 1 calls hang")


async def test_a_tool_may_say_that_it_is_not_the_models_fault(tokenizer: object) -> None:
    def hang() -> None:
        raise ToolUnavailableError("the index is down")

    sample, _ = await played(ToolLoop([hang]), tokenizer, CALL, "it is 3")
    assert sample.status is SampleStatus.FAILED
    assert sample.error.startswith(
        "mine.py:play raised ToolUnavailableError: hang: the index is down"
    )
