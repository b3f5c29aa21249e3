"""Several seats in one episode, each with its conversation, its reward and its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.engines.protocol import EngineError
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import TURNS, records_of, turn_rewards
from sluice.wire import codec
from sluice_rollout.episode import Episode, Play
from sluice_rollout.gateway.registry import EpisodeRegistry
from tests import chat
from tests.unit.gateway.gateway_tools import episode_runner, open_registry, openai_client, token_ids
from tests.unit.rollout.scripted_engine import PARAMS, Script, drain_after_the_last

SEATS = {"rollout__seats": [{"name": "white"}, {"name": "black"}]}


async def play_game(
    registry: EpisodeRegistry, play: Play, engine: Script, sample: Sample | None = None
) -> Sample:
    runner = episode_runner(registry, play, engine)
    runner.seats = tuple(seat.name for seat in registry.spec.rollout.seats)
    params = PARAMS | {"max_new_tokens": 100}
    played = await runner(Prompt(3, "?"), [1], sample or Sample(0), params)
    return codec.sample_from_message(codec.sample_to_message(played))


async def say(ai: Any, seat: str, *texts: str) -> str:
    """Ask for a seat's answer to a history."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    answer = await ai.chat.completions.create(model=seat, messages=messages)
    return str(answer.choices[0].message.content)


async def play(episode: Episode) -> None:
    """Play two rounds of white and one of black."""
    async with openai_client(episode.gateway) as ai:
        opening = await say(ai, "white", "begin")
        await say(ai, "black", opening)
        await say(ai, "white", "begin", opening, "go on")
    episode.turn_reward(0.25, seat="white", turn=0)
    episode.turn_reward(0.5, seat="white")
    episode.reward(1.0, seat="white")
    episode.reward({"score": -1.0, "moves": 3}, seat="black")


def script() -> Script:
    return Script(*[token_ids(text) for text in ("e4", "resign now", "mate")])


def texts(sample: Sample) -> dict[str, str]:
    """Return the trained tokens of each seat, as text."""
    return {
        sequence.seat: chat.tokenizer().decode(
            sequence.tokens[sequence.prompt_length :][sequence.loss_mask == 1]
        )
        for sequence in sample.sequences
    }


async def test_each_seat_has_a_conversation_and_a_reward_of_its_own(tmp_path: Path) -> None:
    async with open_registry(tmp_path, **SEATS) as registry:
        sample = await play_game(registry, play, script())
    assert texts(sample) == {"black": "resign now", "white": "e4mate"}
    assert sample.seat_rewards == {"white": 1.0, "black": -1.0}
    assert sample.reward_parts == {"black/score": -1.0, "black/moves": 3.0}
    assert turn_rewards(sample) == {"white": [0.25, 0.5], "black": [0]}
    assert sample.metadata["seats"]["white"] == {"tool_calls": 0, "answer": "mate"}
    numbers = [
        r["turn"] for records in records_of(sample.metadata) for r in records if r["by"] == "model"
    ]
    assert sorted(numbers) == [0, 1, 2]


async def test_an_interrupted_game_continues_in_another_pod(
    tmp_path: Path,
) -> None:
    async with open_registry(tmp_path, **SEATS) as registry:
        first = Script(*script().answers[:2])
        playing = episode_runner(registry, play, first)
        playing.seats = ("white", "black")
        drain_after_the_last(first, playing)
        params = PARAMS | {"max_new_tokens": 100}
        left = await playing(Prompt(3, "?"), [1], Sample(0), params)
        assert (left.status, left.seat_rewards) == (SampleStatus.ABORTED, {})
        left = codec.sample_from_message(codec.sample_to_message(left))
        last = Script(token_ids("mate"))
        sample = await play_game(registry, play, last, left)
        whole = await play_game(registry, play, script())
    assert len(last.prompt_ids) == 1
    assert sample.status is SampleStatus.COMPLETED
    assert texts(sample) == texts(whole)
    assert turn_rewards(sample) == turn_rewards(whole)


async def test_a_model_name_that_is_not_a_seat_is_refused(tmp_path: Path) -> None:
    names: list[str] = []

    async def mistaken(episode: Episode) -> None:
        async with openai_client(episode.gateway, max_retries=0) as ai:
            names.extend([model.id async for model in ai.models.list()])
            await say(ai, "any", "begin")

    async with open_registry(tmp_path, **SEATS) as registry:
        sample = await play_game(registry, mistaken, Script())
    assert names == ["white", "black"]
    assert "NotFoundError" in sample.error
    assert "'any' is not a seat of this job (rollout.seats): expected one of white, black" in (
        sample.error
    )


@pytest.mark.parametrize(
    ("give", "message"),
    [
        pytest.param(lambda e: e.reward(1, seat="red"), "no seat 'red'", id="reward"),
        pytest.param(lambda e: e.turn_reward(1), "no seat ''", id="a turn without a seat"),
        pytest.param(lambda e: e.turn_reward(1, seat="black"), "IndexError", id="no such turn"),
        pytest.param(
            lambda e: e.turn_reward(float("nan"), seat="white"), "finite number", id="no number"
        ),
    ],
)
async def test_a_reward_for_an_unknown_seat_or_turn_fails_the_sample(
    give: Any, message: str, tmp_path: Path
) -> None:
    async def mistaken(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            await say(ai, "white", "begin")
        give(episode)

    async with open_registry(tmp_path, **SEATS) as registry:
        sample = await play_game(registry, mistaken, Script(token_ids("e4")))
    assert sample.status is SampleStatus.FAILED
    assert message in sample.error


async def test_an_engine_that_dies_at_one_seat_ends_the_episode(tmp_path: Path) -> None:
    async with open_registry(tmp_path, **SEATS) as registry:
        with pytest.raises(EngineError, match="gone"):
            await play_game(registry, play, Script(token_ids("e4"), EngineError("gone")))


async def test_without_seats_any_name_is_the_model(tmp_path: Path) -> None:
    async def alone(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            await say(ai, "white", "begin")
        episode.turn_reward(0.5)
        episode.turn_reward(0.25)

    async with open_registry(tmp_path) as registry:
        sample = await play_game(registry, alone, Script(token_ids("e4")))
    assert (sample.seat, sample.metadata[TURNS][0]["reward"]) == ("", 0.75)


async def test_a_claim_is_refused_if_the_job_has_seats(tmp_path: Path) -> None:
    async def claiming(episode: Episode) -> None:
        episode.gateway.claim_sample([1, 2], [1])

    async with open_registry(tmp_path, **SEATS) as registry:
        sample = await play_game(registry, claiming, Script())
    assert "the job has rollout.seats" in sample.error
