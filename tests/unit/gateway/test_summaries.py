"""A history that leaves no room is summarised by the model, and goes on from that."""

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
from tests.unit.gateway.test_server import client, counted, desk, ids, seated
from tests.unit.gateway.test_shortening import LONG, result
from tests.unit.rollout.test_episode import PARAMS, Script

TURNS_ASKED = 8
SYSTEM, TASK = {"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}
LIMITS = {
    "overflow": "summarise",
    "turnTokens": 20,
    "summary": {"prompt": "sum up!", "tokens": 50, "most": 8},
}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_history_is_asked_about_behind_the_models_last_answer() -> None:
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
def test_a_summary_stands_behind_the_last_question(history: Messages, behind: Messages) -> None:
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
    """An engine that says `on`, and writes a summary where it is asked for one."""

    def __init__(self, summary: str = "all is well") -> None:
        super().__init__()
        self.summary = ids(summary)

    async def generate(self, rid: str, input_ids: list[int], *more: Any, **options: Any) -> Any:
        text = chat.tokenizer().decode(input_ids)
        asked = text.rstrip().endswith("sum up!<|im_end|>\n<|im_start|>assistant")
        self.answers.append(self.summary if asked else ids("on"))
        answer: Generation = await super().generate(rid, input_ids, *more, **options)
        return answer

    def texts(self) -> list[str]:
        return [chat.tokenizer().decode(tokens) for tokens in self.asked]


async def episode(
    directory: Path, engine: Script, limits: dict[str, Any], tokens: int = 1000
) -> tuple[Sample, int]:
    """The sample of a client that keeps all it has seen, and how many answers it has had."""
    answers = 0

    async def play(episode: Episode) -> None:
        nonlocal answers
        async with client(episode.gateway) as ai:
            messages: list[Any] = [SYSTEM, TASK]
            for number in range(TURNS_ASKED):
                answer = await ai.chat.completions.create(model="any", messages=messages)
                answers += 1
                messages += [answer.choices[0].message, result(str(number))]

    async with desk(directory, rollout__limits=limits) as one:
        guest = seated(one, play, engine)
        params = PARAMS | {"max_new_tokens": tokens}
        return await guest(Prompt(3, "?"), [1], Sample(0), params), answers


async def test_an_episode_outlives_its_context_by_summaries(tmp_path: Path) -> None:
    """Each turn takes some 330 tokens of a branch's 1,000."""
    engine, before = Scribe(), counted("summaries", outcome="ok")
    sample, answers = await episode(tmp_path, engine, LIMITS)
    written = sum("sum up!" in text for text in engine.texts())
    assert (sample.error, answers, sample.status) == ("", TURNS_ASKED, SampleStatus.COMPLETED)
    assert counted("summaries", outcome="ok") - before == written > 1
    assert sample.trainable_tokens == TURNS_ASKED * len(ids("on")) + written * len(engine.summary)
    assert len(sample.sequences) == written + 1
    last = engine.texts()[-1]
    assert last.count(INTRODUCTION) == 1, "the newest summary stands for all before it"
    assert "be brief" in last
    assert LONG in last, "the result that is not answered yet is there"
    assert all(one.response_length <= 1000 for one in sample.sequences)


@pytest.mark.parametrize(
    ("limits", "summary", "outcome"),
    [
        pytest.param({"summary": {"tokens": 50, "prompt": "sum up!", "most": 1}}, "well", "ok",
                     id="no further summary"),
        pytest.param({}, "on and on, " * 20, "cut", id="a summary without an end"),
        pytest.param({"turns": 3}, "well", "ok", id="no further turn"),
    ],
)  # fmt: skip
async def test_an_episode_ends_where_summaries_do(
    limits: dict[str, Any], summary: str, outcome: str, tmp_path: Path
) -> None:
    before = counted("summaries", outcome=outcome)
    sample, answers = await episode(tmp_path, Scribe(summary), LIMITS | limits)
    assert 0 < answers < TURNS_ASKED
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert counted("summaries", outcome=outcome) - before <= 1


async def test_a_result_that_no_summary_makes_room_for_ends_the_episode(tmp_path: Path) -> None:
    """The task, one call and its result are more than a branch may have before its first answer."""

    async def play(episode: Episode) -> None:
        async with client(episode.gateway) as ai:
            messages: list[Any] = [SYSTEM, TASK]
            answer = await ai.chat.completions.create(model="any", messages=messages)
            messages += [answer.choices[0].message, result("0", "x" * 5000)]
            await ai.chat.completions.create(model="any", messages=messages)

    engine = Scribe()
    async with desk(tmp_path, rollout__limits=LIMITS) as one:
        guest = seated(one, play, engine)
        params = PARAMS | {"max_new_tokens": 1000}
        sample = await guest(Prompt(3, "?"), [1], Sample(0), params)
    assert sample.status is SampleStatus.TRUNCATED
    assert len(engine.asked) == 2
    assert [turn["length"] for turn in sample.metadata[TURNS] if turn["by"] == "model"] == [2, 11]


async def test_a_summary_is_found_again_by_the_pod_that_goes_on(tmp_path: Path) -> None:
    """The first pod ends behind the summary; the second one plays the same from the start."""

    async def play(episode: Episode) -> None:
        async with client(episode.gateway) as ai:
            messages: list[Any] = [SYSTEM, TASK]
            for number in range(4):
                answer = await ai.chat.completions.create(model="any", messages=messages)
                messages += [answer.choices[0].message, result(str(number))]

    class Leaving(Scribe):
        """The pod ends once a summary is written."""

        async def generate(self, *arguments: Any, **options: Any) -> Any:
            answer = await super().generate(*arguments, **options)
            if answer.tokens == self.summary:
                first.generator.draining.set()
            return answer

    params = PARAMS | {"max_new_tokens": 1000}
    async with desk(tmp_path, rollout__limits=LIMITS) as one:
        first = seated(one, play, Leaving())
        left = await first(Prompt(3, "?"), [1], Sample(0), params)
        assert left.status is SampleStatus.ABORTED
        left = codec.sample_from_message(codec.sample_to_message(left))
        engine = Scribe()
        second = seated(one, play, engine)
        sample = await second(Prompt(3, "?"), [1], left, params)
        whole = await seated(one, play, Scribe())(Prompt(3, "?"), [1], Sample(0), params)
    assert (sample.error, sample.status) == ("", SampleStatus.COMPLETED)
    assert not any("sum up!" in text for text in engine.texts()), "it is not written twice"
    assert [s.tokens.tolist() for s in sample.sequences] == [
        s.tokens.tolist() for s in whole.sequences
    ]


async def test_rewards_of_turns_pass_over_summaries(tmp_path: Path) -> None:
    async def play(episode: Episode) -> None:
        async with client(episode.gateway) as ai:
            messages: list[Any] = [SYSTEM, TASK]
            for number in range(4):
                answer = await ai.chat.completions.create(model="any", messages=messages)
                messages += [answer.choices[0].message, result(str(number))]
        for number in range(4):
            episode.turn_reward(number + 1.0, turn=number)

    engine = Scribe()
    async with desk(tmp_path, rollout__limits=LIMITS) as one:
        guest = seated(one, play, engine)
        params = PARAMS | {"max_new_tokens": 1000}
        sample = await guest(Prompt(3, "?"), [1], Sample(0), params)
    rewards = turn_rewards(sample)[""]
    assert len(engine.asked) == len(rewards) == 5
    assert [r for r in rewards if r] == [1, 2, 3, 4]
    assert rewards.count(0) == 1
