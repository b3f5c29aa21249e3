"""Built-in rewards by table; a user's function that raises, hangs or returns nonsense fails its sample alone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sluice.api import Reward
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.contains import contains
from sluice.rewards.exact_match import exact_match
from sluice.rewards.f1 import f1
from sluice.rewards.judge import Judge
from sluice.rewards.types import read_value

USER = """
import asyncio, os, time
def good(sample): return len(sample.response)
async def later(sample):
    await asyncio.sleep(0.01)
    return {"score": 0.5, "kind": "x"}
def moody(sample):
    if sample.response == "raise": raise ValueError("no such unit")
    if sample.response == "hang": time.sleep(1000)
    if sample.response == "die": os._exit(3)
    if sample.response == "text": return "very good"
    if sample.response == "nan": return float("nan")
    if sample.response == "eat": return len(bytearray(8 << 30))
    return 1.0
def ranks(samples): return [i for i, _ in enumerate(samples)]
def short(samples): return [1.0]
"""


def sample(response: str, label: Any = None, **metadata: Any) -> RewardInput:
    return RewardInput(prompt="p", response=response, label=label, metadata=metadata)


@pytest.mark.parametrize(
    ("reward", "response", "label", "expected"),
    [
        (exact_match, " 42\n", "42", 1.0),
        (exact_match, "42", 42, 1.0),
        (exact_match, "421", "42", 0.0),
        (exact_match, "", "42", 0.0),
        (contains, "it is 42.", "42", 1.0),
        (contains, "it is 4 2", "42", 0.0),
        (f1, "The cat sat", "a cat sat", 1.0),
        (f1, "cat", "cat sat", 2 / 3),
        (f1, "dog", ["cat", "dog"], 1.0),
        (f1, "", "cat", 0.0),
    ],
)
def test_built_in(reward: Any, response: str, label: Any, expected: float) -> None:
    assert reward(sample(response, label)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ({"score": 1}, None, "set reward.key"),
        ({"score": 1}, "acc", "no number 'acc'; it has score"),
        ("good", None, "expected a number"),
        (None, None, "expected a number"),
        (float("inf"), None, "expected a finite number"),
    ],
)
def test_nonsense_is_refused_with_its_cause(value: Any, key: str | None, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        read_value(value, key)


def test_the_key_picks_and_the_parts_stay() -> None:
    assert read_value({"score": 1, "acc": False, "note": "x"}, "score") == (1.0, {"score": 1.0, "acc": 0.0})


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "judges.py"
    path.write_text(USER)
    return path


async def judged(path: Path, name: str, samples: list[RewardInput], **fields: Any) -> list[Any]:
    judge = Judge(Reward(function=f"{path}:{name}", **fields), workers=1)
    try:
        return await judge(samples)
    finally:
        await judge.close()


async def test_functions_sync_and_async(user_file: Path) -> None:
    assert await judged(user_file, "good", [sample("abc")]) == [(3.0, {})]
    assert await judged(user_file, "later", [sample("abc")], key="score") == [(0.5, {"score": 0.5})]


async def test_one_bad_sample_fails_alone(user_file: Path) -> None:
    words = ["ok", "raise", "hang", "text", "die", "nan", "eat", "ok"]
    outcomes = await judged(
        user_file, "moody", [sample(w) for w in words], timeout_seconds=3, sandbox={"memory": "6Gi"}
    )
    assert outcomes[0] == outcomes[-1] == (1.0, {})
    messages = [str(o) for o in outcomes[1:-1]]
    assert all(isinstance(o, RewardError) for o in outcomes[1:-1])
    assert "raised ValueError: no such unit" in messages[0]
    assert "no reward after 3 s" in messages[1]
    assert "'very good', expected a number" in messages[2]
    assert "its process died" in messages[3]
    assert "expected a finite number" in messages[4]
    assert "MemoryError" in messages[5]


async def test_processes_that_are_killed_from_outside_fail_no_sample(user_file: Path) -> None:
    judge = Judge(Reward(function=f"{user_file}:good"), workers=2)
    try:
        for _ in range(2):
            assert await judge([sample("abc")]) == [(3.0, {})]
            for child in multiprocessing.active_children():
                child.kill()
            time.sleep(0.5)
        assert await judge([sample("ab")] * 4) == [(2.0, {})] * 4
    finally:
        await judge.close()


async def test_group_rewards(user_file: Path) -> None:
    group = [sample("a"), sample("b")]
    assert await judged(user_file, "ranks", group, group=True) == [(0.0, {}), (1.0, {})]
    outcomes = await judged(user_file, "short", group, group=True)
    assert all("expected a list of 2 rewards" in str(o) for o in outcomes)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{file}:nothing", "has no function 'nothing'; it has good"),
        ("/no/such.py:f", "there is no file"),
        ("a.b.c", "No module"),
    ],
)
async def test_a_wrong_path_is_said_at_the_start(user_file: Path, path: str, message: str) -> None:
    judge = Judge(Reward(function=path.format(file=user_file)), workers=1)
    try:
        with pytest.raises(RewardError, match=message):
            await judge.check()
    finally:
        await judge.close()


async def test_a_row_may_name_its_own_reward() -> None:
    judge = Judge(Reward(type="exact_match"))
    outcomes = await judge([sample("it is 4", "4", rm_type="contains"), sample("4", "4", rm_type="nope")])
    assert outcomes[0] == (1.0, {})
    assert "no reward is called 'nope'" in str(outcomes[1])


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    from aiohttp import web

    seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        if len(seen) < 2:
            return web.Response(status=503)
        return web.json_response(0.25)

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1], seen
    await runner.cleanup()


async def test_remote_rewards_speak_slimes_protocol_and_retry(server: Any) -> None:
    port, seen = server
    judge = Judge(Reward(url=f"http://127.0.0.1:{port}/"))
    try:
        assert await judge([sample("r", "l")]) == [(0.25, {})]
    finally:
        await judge.close()
    assert seen == [{"prompt": "p", "response": "r", "label": "l"}] * 2
