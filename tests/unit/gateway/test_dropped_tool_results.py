"""Old results of tools are dropped if a history becomes too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.samples.sample import Messages, Prompt, Sample, SampleStatus
from sluice_rollout.episode import Episode
from sluice_rollout.gateway.compaction import DROPPED, ToolResultDropper
from tests import chat
from tests.unit.gateway.gateway_tools import (
    counter_value,
    episode_runner,
    open_registry,
    openai_client,
    token_ids,
)
from tests.unit.rollout.scripted_engine import PARAMS, Script

LONG = "x" * 300
TURNS = 8


def result(name: str, content: str = LONG) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content}


def history(results: int, *behind: dict[str, Any]) -> Messages:
    """Make a history: a question, a number of answered results, and further messages."""
    turns = [[result(str(n)), {"role": "assistant", "content": "on"}] for n in range(results)]
    return [{"role": "user", "content": LONG}, *(m for turn in turns for m in turn), *behind]


def left(messages: Messages) -> list[str]:
    return [m["tool_call_id"] for m in messages if m["role"] == "tool" and m["content"] != DROPPED]


def test_the_older_half_of_the_results_is_dropped_each_time() -> None:
    shortener, messages = ToolResultDropper(), history(4)
    assert left(shortener.shorten(messages)) == ["0", "1", "2", "3"]
    counts = [shortener.drop(messages) for _ in range(4)]
    assert counts == [2, 1, 1, 0]
    assert left(shortener.shorten(history(6))) == ["4", "5"]


def test_a_result_is_identified_by_its_history_and_not_by_its_call_id() -> None:
    """Some clients number the calls of each turn anew, or give all calls the same id."""
    shortener = ToolResultDropper()
    messages = [message | {"tool_call_id": "call_0"} for message in history(4)]
    assert shortener.drop(messages) == 2
    longer = [*messages, result("call_0"), {"role": "assistant", "content": "on"}]
    shown = shortener.shorten(longer)
    assert [m["content"] == DROPPED for m in shown if m["role"] == "tool"] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_a_result_of_another_conversation_stays() -> None:
    shortener = ToolResultDropper()
    shortener.drop(history(4))
    other = [{"role": "user", "content": "another question"}, *history(4)[1:]]
    assert left(shortener.shorten(other)) == ["0", "1", "2", "3"]


def test_results_that_the_model_has_not_answered_stay() -> None:
    shortener, messages = ToolResultDropper(), history(1, result("new"))
    assert (shortener.drop(messages), shortener.drop(messages)) == (1, 0)
    assert left(shortener.shorten(messages)) == ["new"]


def test_a_result_that_is_shorter_than_the_placeholder_stays() -> None:
    assert ToolResultDropper().drop([result("0", "4"), {"role": "assistant", "content": "on"}]) == 0


@given(st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=20), st.integers(0, 6))
def test_only_results_change_and_all_of_them_are_dropped_in_the_end(
    roles: list[str], drops: int
) -> None:
    messages: Messages = [{"role": role, "content": f"{n} {LONG}"} for n, role in enumerate(roles)]
    shortener = ToolResultDropper()
    total = sum(shortener.drop(messages) for _ in range(drops))
    shown = shortener.shorten(messages)
    changed = [old for old, new in zip(messages, shown, strict=True) if old != new]
    assert len(changed) == total
    assert {message["role"] for message in changed} <= {"tool"}
    assert sum(len(m["content"]) for m in shown) <= sum(len(m["content"]) for m in messages)


async def episode(
    directory: Path, engine: Script, limits: dict[str, Any], call_id: str = "call_{}"
) -> tuple[Sample, int]:
    """Play a client that keeps its whole history. Returns the sample and the number of answers."""
    answers = 0

    async def play(episode: Episode) -> None:
        nonlocal answers
        async with openai_client(episode.gateway) as ai:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            for number in range(TURNS):
                answer = await ai.chat.completions.create(model="any", messages=messages)
                answers += 1
                messages += [answer.choices[0].message, result(call_id.format(number))]

    async with open_registry(directory, rollout__limits=limits) as registry:
        runner = episode_runner(registry, play, engine)
        params = PARAMS | {"max_new_tokens": 1000}
        return await runner(Prompt(3, "?"), [1], Sample(0), params), answers


@pytest.mark.parametrize("turn_tokens", [20, 5000], ids=["a turn's", "more than any turn's"])
async def test_an_episode_outlives_its_context(turn_tokens: int, tmp_path: Path) -> None:
    """A turn takes about 320 of a branch's 1,000 tokens."""
    engine, before = Script(*[token_ids("on")] * TURNS), counter_value("dropped_results")
    limits = {"overflow": "drop_tool_results", "turnTokens": turn_tokens}
    sample, answers = await episode(tmp_path, engine, limits)
    assert (sample.error, answers) == ("", TURNS)
    assert sample.status is SampleStatus.COMPLETED
    prompts = [chat.tokenizer().decode(tokens) for tokens in engine.prompt_ids]
    assert [text.count(DROPPED) for text in prompts] == sorted(
        text.count(DROPPED) for text in prompts
    )
    assert prompts[-1].count(DROPPED) == counter_value("dropped_results") - before > 2
    assert LONG in prompts[-1].rpartition("assistant")[0], "the newest result is there"
    assert sample.trainable_tokens == TURNS * len(token_ids("on"))
    assert 1 < len(sample.sequences) < TURNS


async def test_the_newest_result_is_seen_if_a_client_repeats_call_ids(tmp_path: Path) -> None:
    engine = Script(*[token_ids("on")] * TURNS)
    limits = {"overflow": "drop_tool_results", "turnTokens": 20}
    _, answers = await episode(tmp_path, engine, limits, call_id="call_0")
    assert answers == TURNS
    prompts = [chat.tokenizer().decode(tokens) for tokens in engine.prompt_ids]
    assert all(LONG in text.rpartition("assistant")[0] for text in prompts[1:])


@pytest.mark.parametrize(
    ("limits", "answers"),
    [
        pytest.param({}, 4, id="by default it is truncated"),
        pytest.param({"overflow": "drop_tool_results", "branches": 1}, 4, id="no further branch"),
        pytest.param({"overflow": "drop_tool_results", "turns": 5}, 5, id="no further turn"),
    ],
)
async def test_an_episode_is_truncated(
    limits: dict[str, Any], answers: int, tmp_path: Path
) -> None:
    sample, had = await episode(tmp_path, Script(*[token_ids("on")] * TURNS), limits)
    assert (had, sample.status) == (answers, SampleStatus.TRUNCATED)
