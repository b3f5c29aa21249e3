"""A history that leaves no room is summarised by the model, and continues from the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.engines.protocol import Generation
from sluice.samples.sample import Messages, Prompt, Sample, SampleStatus
from sluice.samples.turns import TURNS, turn_rewards
from sluice.wire import codec
from sluice_rollout.episode import Episode
from sluice_rollout.gateway.compaction import (
    DROPPED,
    INTRODUCTION,
    Summaries,
    summary_request,
    summary_text,
)
from tests import chat
from tests.unit.gateway.gateway_tools import (
    counter_value,
    episode_runner,
    open_registry,
    openai_client,
    token_ids,
)
from tests.unit.gateway.test_dropped_tool_results import LONG, result
from tests.unit.rollout.scripted_engine import PARAMS, Script

TURNS_ASKED = 8
SYSTEM, TASK = {"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}
LIMITS = {
    "overflow": "summarise",
    "turnTokens": 20,
    "summary": {"prompt": "sum up!", "tokens": 50, "most": 8},
}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_summary_is_requested_after_the_models_last_answer() -> None:
    history: Messages = [SYSTEM, TASK, said("one"), result("0"), said("two"), result("1")]
    assert summary_request(history, "sum up") == [
        *history[:5],
        result("1", DROPPED),
        {"role": "user", "content": "sum up"},
    ]
    assert summary_request([SYSTEM, TASK], "sum up") is None


@pytest.mark.parametrize(
    ("history", "behind"),
    [
        pytest.param(
            [SYSTEM, TASK, said("one"), result("0"), said("two"), result("1")],
            [said("two"), result("1")],
            id="results that nobody has read stay",
        ),
        pytest.param([SYSTEM, TASK, said("one"), TASK], [], id="a new question"),
    ],
)
def test_a_summary_follows_the_last_question(history: Messages, behind: Messages) -> None:
    summaries = Summaries()
    summaries.replace(history, None, "all is well")
    shown = {"role": "user", "content": f"go\n\n{INTRODUCTION}\nall is well"}
    new = said("three")
    assert summaries.shorten([*history, new], None) == [SYSTEM, shown, *behind, new]
    assert summaries.shorten(history[:2], None) == history[:2], "another history"
    assert summaries.shorten([*history, new], [{"type": "function"}]) == [*history, new]


def test_a_summary_is_without_its_thoughts() -> None:
    assert summary_text("<think>hm</think>\n all is well ") == "all is well"
    assert summary_text("all is well") == "all is well"


class Scribe(Script):
    """An engine that answers `on`, or with a summary if the prompt asks for one."""

    def __init__(self, summary: str = "all is well") -> None:
        super().__init__()
        self.summary = token_ids(summary)

    async def generate(self, rid: str, input_ids: list[int], *more: Any, **options: Any) -> Any:
        text = chat.tokenizer().decode(input_ids)
        is_summary_request = text.rstrip().endswith("sum up!<|im_end|>\n<|im_start|>assistant")
        self.answers.append(self.summary if is_summary_request else token_ids("on"))
        answer: Generation = await super().generate(rid, input_ids, *more, **options)
        return answer

    def texts(self) -> list[str]:
        return [chat.tokenizer().decode(tokens) for tokens in self.prompt_ids]


async def episode(
    directory: Path, engine: Script, limits: dict[str, Any], tokens: int = 1000
) -> tuple[Sample, int]:
    """Play a client that keeps its whole history. Returns the sample and the number of answers."""
    answers = 0

    async def play(episode: Episode) -> None:
        nonlocal answers
        async with openai_client(episode.gateway) as ai:
            messages: list[Any] = [SYSTEM, TASK]
            for number in range(TURNS_ASKED):
                answer = await ai.chat.completions.create(model="any", messages=messages)
                answers += 1
                messages += [answer.choices[0].message, result(str(number))]

    async with open_registry(directory, rollout__limits=limits) as registry:
        runner = episode_runner(registry, play, engine)
        params = PARAMS | {"max_new_tokens": tokens}
        return await runner(Prompt(3, "?"), [1], Sample(0), params), answers


async def test_an_episode_outlives_its_context_by_summaries(tmp_path: Path) -> None:
    """A turn takes about 330 of a branch's 1,000 tokens."""
    engine, before = Scribe(), counter_value("summaries", outcome="ok")
    sample, answers = await episode(tmp_path, engine, LIMITS)
    written = sum("sum up!" in text for text in engine.texts())
    assert (sample.error, answers, sample.status) == ("", TURNS_ASKED, SampleStatus.COMPLETED)
    assert counter_value("summaries", outcome="ok") - before == written > 1
    assert sample.trainable_tokens == TURNS_ASKED * len(token_ids("on")) + written * len(
        engine.summary
    )
    assert len(sample.sequences) == written + 1
    last = engine.texts()[-1]
    assert last.count(INTRODUCTION) == 1, "the newest summary stands for all before it"
    assert "be brief" in last
    assert LONG in last, "the result that is not answered yet is there"
    assert all(registry.response_length <= 1000 for registry in sample.sequences)


@pytest.mark.parametrize(
    ("limits", "summary", "outcome"),
    [
        pytest.param({"summary": {"tokens": 50, "prompt": "sum up!", "most": 1}}, "well", "ok",
                     id="no further summary"),
        pytest.param({}, "on and on, " * 20, "cut", id="a summary without an end"),
        pytest.param({"turns": 3}, "well", "ok", id="no further turn"),
    ],
)  # fmt: skip
async def test_an_episode_ends_after_its_last_summary(
    limits: dict[str, Any], summary: str, outcome: str, tmp_path: Path
) -> None:
    before = counter_value("summaries", outcome=outcome)
    sample, answers = await episode(tmp_path, Scribe(summary), LIMITS | limits)
    assert 0 < answers < TURNS_ASKED
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert counter_value("summaries", outcome=outcome) - before <= 1


async def test_a_result_that_is_too_long_even_after_a_summary_ends_the_episode(
    tmp_path: Path,
) -> None:
    """Task, call and result are longer than a prompt may be."""

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            messages: list[Any] = [SYSTEM, TASK]
            answer = await ai.chat.completions.create(model="any", messages=messages)
            messages += [answer.choices[0].message, result("0", "x" * 5000)]
            await ai.chat.completions.create(model="any", messages=messages)

    engine = Scribe()
    async with open_registry(tmp_path, rollout__limits=LIMITS) as registry:
        runner = episode_runner(registry, play, engine)
        params = PARAMS | {"max_new_tokens": 1000}
        sample = await runner(Prompt(3, "?"), [1], Sample(0), params)
    assert sample.status is SampleStatus.TRUNCATED
    assert len(engine.prompt_ids) == 2
    assert [turn["length"] for turn in sample.metadata[TURNS] if turn["by"] == "model"] == [2, 11]


async def test_the_next_pod_finds_the_summary_of_an_interrupted_episode(tmp_path: Path) -> None:
    """The first pod ends after the summary; the second one plays the episode from the start."""

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            messages: list[Any] = [SYSTEM, TASK]
            for number in range(4):
                answer = await ai.chat.completions.create(model="any", messages=messages)
                messages += [answer.choices[0].message, result(str(number))]

    class Leaving(Scribe):
        """End the pod once a summary is written."""

        async def generate(self, *arguments: Any, **options: Any) -> Any:
            answer = await super().generate(*arguments, **options)
            if answer.tokens == self.summary:
                first.generator.draining.set()
            return answer

    params = PARAMS | {"max_new_tokens": 1000}
    async with open_registry(tmp_path, rollout__limits=LIMITS) as registry:
        first = episode_runner(registry, play, Leaving())
        left = await first(Prompt(3, "?"), [1], Sample(0), params)
        assert left.status is SampleStatus.ABORTED
        left = codec.sample_from_message(codec.sample_to_message(left))
        engine = Scribe()
        second = episode_runner(registry, play, engine)
        sample = await second(Prompt(3, "?"), [1], left, params)
        whole = await episode_runner(registry, play, Scribe())(
            Prompt(3, "?"), [1], Sample(0), params
        )
    assert (sample.error, sample.status) == ("", SampleStatus.COMPLETED)
    assert not any("sum up!" in text for text in engine.texts()), "it is not written twice"
    assert [s.tokens.tolist() for s in sample.sequences] == [
        s.tokens.tolist() for s in whole.sequences
    ]


async def test_rewards_of_turns_pass_over_summaries(tmp_path: Path) -> None:
    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            messages: list[Any] = [SYSTEM, TASK]
            for number in range(4):
                answer = await ai.chat.completions.create(model="any", messages=messages)
                messages += [answer.choices[0].message, result(str(number))]
        for number in range(4):
            episode.turn_reward(number + 1.0, turn=number)

    engine = Scribe()
    async with open_registry(tmp_path, rollout__limits=LIMITS) as registry:
        runner = episode_runner(registry, play, engine)
        params = PARAMS | {"max_new_tokens": 1000}
        sample = await runner(Prompt(3, "?"), [1], Sample(0), params)
    rewards = turn_rewards(sample)[""]
    assert len(engine.prompt_ids) == len(rewards) == 5
    assert [r for r in rewards if r] == [1, 2, 3, 4]
    assert rewards.count(0) == 1
