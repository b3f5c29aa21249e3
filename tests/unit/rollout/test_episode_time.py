"""The limit of an episode's time: what is cut off, what is kept, and what the sample is then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY

from sluice.api.groups.episode import EpisodeLimits
from sluice.samples.sample import Prompt, Sample, SampleStatus, WeightSpan
from sluice.samples.turns import TIMED_OUT
from sluice.wire import codec
from sluice_rollout import generate
from sluice_rollout.episode import Episode, Play, whole_group
from sluice_rollout.user_functions import time_limit
from tests.unit.rollout.scripted_engine import PARAMS, PROMPT, Script, SlowScript, scripted_runner

REACHED = "took more than 0.2 s (rollout.limits.seconds)"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(generate, "_PAUSE_BETWEEN_ABORTS_SECONDS", 0.01)


async def play_limited(play: Play, engine: Script, count: int = 1, **limits: Any) -> list[Sample]:
    """Play samples of a prompt with 0.2 s for an episode. Nothing of it may hang."""
    runner = scripted_runner(play, engine)
    runner.limits = EpisodeLimits.model_validate({"seconds": 0.2, **limits})
    samples = [Sample(index) for index in range(count)]
    await asyncio.wait_for(runner.run_group(Prompt(0, "?"), PROMPT, samples, PARAMS), 30)
    for sample in samples:
        codec.sample_to_message(sample)
    return samples


def timeouts(outcome: str) -> float:
    labels = {"outcome": outcome}
    return REGISTRY.get_sample_value("sluice_rollout_episode_timeouts_total", labels) or 0.0


async def talk(episode: Episode) -> None:
    while True:
        await episode.generate()
        episode.observe([90])


async def test_a_turn_is_cut_off_and_its_tokens_are_kept_as_they_were_sampled() -> None:
    before, engine = timeouts("truncated"), SlowScript([10, 11], cut=[12, 13])
    engine.version = 3
    (sample,) = await play_limited(talk, engine)
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert sample.tokens.tolist() == [*PROMPT, 10, 11, 90, 12, 13]
    assert sample.loss_mask.tolist() == [1, 1, 0, 1, 1]
    assert sample.rollout_log_probs.tolist() == [-0.5, -0.5, 0, -0.5, -0.5]
    assert sample.weight_versions == [WeightSpan(3, 0, 5)]
    assert sample.metadata[TIMED_OUT] == REACHED
    assert timeouts("truncated") == before + 1
    assert len(set(engine.aborted)) == 1


async def test_an_engine_that_ignores_the_abort_loses_the_turn_and_holds_up_nothing() -> None:
    engine = SlowScript([10, 11], cut=[], deaf=True)
    (sample,) = await play_limited(talk, engine)
    assert (sample.status, sample.metadata[TIMED_OUT]) == (SampleStatus.TRUNCATED, REACHED)
    assert sample.tokens.tolist() == [*PROMPT, 10, 11, 90]
    assert engine.cancelled == 1


async def test_a_tool_that_hangs_is_ended_and_earlier_rewards_stay() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        episode.reward(0.25)
        await asyncio.sleep(1000)

    (sample,) = await play_limited(play, Script([10, 11]))
    assert (sample.status, sample.reward) == (SampleStatus.TRUNCATED, 0.25)
    assert sample.tokens.tolist() == [*PROMPT, 10, 11]
    assert sample.metadata[TIMED_OUT] == REACHED


async def test_what_ends_by_itself_soon_after_the_time_is_complete() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        await episode.time_limit.over.wait()
        episode.reward(1.0)

    (sample,) = await play_limited(play, Script([10, 11]))
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 1.0)
    assert TIMED_OUT not in sample.metadata


async def test_the_time_begins_with_the_first_turn() -> None:
    async def play(episode: Episode) -> None:
        await asyncio.sleep(0.6)
        await episode.generate()

    (sample,) = await play_limited(play, Script([10, 11]))
    assert sample.status is SampleStatus.COMPLETED


async def test_the_sample_fails_if_the_job_says_so() -> None:
    before, engine = timeouts("failed"), SlowScript([10, 11], cut=[12])
    (sample,) = await play_limited(talk, engine, onTimeout="fail")
    assert sample.status is SampleStatus.FAILED
    assert sample.error == f"mine.py:play {REACHED}"
    assert engine.cancelled == 1
    assert timeouts("failed") == before + 1


async def test_without_tokens_there_is_nothing_to_judge() -> None:
    (sample,) = await play_limited(talk, SlowScript(cut=[]))
    assert sample.status is SampleStatus.FAILED
    assert "before the model generated a token" in sample.error


async def test_a_function_of_a_whole_group_has_one_time() -> None:
    @whole_group
    async def play(episodes: list[Episode]) -> None:
        for episode in episodes:
            await episode.generate()
        await asyncio.sleep(1000)

    samples = await play_limited(play, Script([10], [11]), count=2)
    assert [sample.status for sample in samples] == [SampleStatus.TRUNCATED] * 2
    assert all(sample.metadata[TIMED_OUT] == REACHED for sample in samples)


async def test_time_between_two_turns_is_limited_as_well_and_fails_the_sample() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        await asyncio.sleep(1000)

    runner = scripted_runner(play, Script([10]), seconds=0.1)
    runner.limits = EpisodeLimits(seconds=60.0)
    sample = await asyncio.wait_for(runner(Prompt(0, "?"), PROMPT, Sample(0), PARAMS), 30)
    assert sample.status is SampleStatus.FAILED
    assert "rollout.functionSeconds" in sample.error
