"""A generate function's conversation: tokens, masks, ends, interruptions, repetitions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sluice.engines.protocol import EngineError, Generation, PromptRefusedError
from sluice.samples.sample import Prompt, Sample, SampleStatus, WeightSpan
from sluice.samples.turns import TURNS
from sluice.wire import codec
from sluice_rollout.episode import Episode, EpisodeEndError
from tests.unit.rollout.scripted_engine import (
    PARAMS,
    PROMPT,
    Script,
    drain_after_the_last,
    run,
    scripted_runner,
)


async def ask_twice(episode: Episode) -> None:
    await episode.generate()
    episode.observe("90 91")
    await episode.generate()


async def test_what_the_model_said_is_trained_and_what_it_was_told_is_not() -> None:
    engine = Script([10, 11], [12])
    sample = await run(ask_twice, engine)
    assert engine.prompt_ids == [PROMPT, [*PROMPT, 10, 11, 90, 91]]
    assert sample.tokens.tolist() == [*PROMPT, 10, 11, 90, 91, 12]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 1]
    assert sample.rollout_log_probs.tolist() == [-0.5, -0.5, 0, 0, -0.5]
    assert sample.weight_versions == [WeightSpan(0, 0, 5)]
    assert (sample.status, sample.response, sample.response_length) == (
        SampleStatus.COMPLETED,
        "10 11 90 91 12",
        5,
    )
    sample.check_tokens()


async def test_an_observation_before_any_turn_has_the_present_version() -> None:
    async def play(episode: Episode) -> None:
        episode.observe([90])
        await episode.generate()

    engine = Script([10])
    engine.version = 4
    sample = await run(play, engine)
    assert sample.weight_versions == [WeightSpan(4, 0, 2)]
    assert sample.loss_mask.tolist() == [0, 1]


async def test_a_weight_update_in_the_middle_of_a_turn_leaves_a_span_for_each_version() -> None:
    engine = Script([10], "11 12", [13])

    async def play(episode: Episode) -> None:
        await episode.generate()
        episode.observe([90])
        engine.version = 1
        turn = await episode.generate()
        assert turn.tokens == [11, 12, 13]
        assert turn.log_probs == [-0.5] * 3

    sample = await run(play, engine)
    assert sample.weight_versions == [WeightSpan(0, 0, 2), WeightSpan(1, 2, 5)]
    assert sample.loss_mask.tolist() == [1, 0, 1, 1, 1]


async def test_the_limit_of_tokens_counts_observations_and_ends_the_episode() -> None:
    async def play(episode: Episode) -> None:
        while True:
            await episode.generate()
            episode.observe([90, 91])

    sample = await run(play, Script([10, 11], [12, 13], [14, 15, 16]))
    assert (sample.status, sample.response_length) == (SampleStatus.TRUNCATED, 10)
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]


async def test_an_observation_that_does_not_fit_is_left_out() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        episode.observe([90] * 9)

    sample = await run(play, Script([10, 11]))
    assert (sample.status, sample.response_length) == (SampleStatus.TRUNCATED, 2)


async def test_a_turn_may_be_shorter_than_the_response() -> None:
    async def play(episode: Episode) -> None:
        turn = await episode.generate(max_tokens=2)
        assert (turn.tokens, turn.finish) == ([10, 11], "length")
        await episode.generate()

    assert (await run(play, Script([10, 11, 12], [13]))).status is SampleStatus.COMPLETED


@pytest.mark.parametrize("swallow", [False, True])
async def test_a_drain_keeps_the_turns_and_another_player_goes_on_in_the_middle_of_one(
    swallow: bool,
) -> None:
    async def play(episode: Episode) -> None:
        try:
            await ask_twice(episode)
        except EpisodeEndError:
            if not swallow:
                raise

    engine = Script([10, 11], "12")
    first = scripted_runner(play, engine)
    drain_after_the_last(engine, first)
    sample = await first(Prompt(0, "?"), PROMPT, Sample(0), PARAMS)
    assert (sample.status, sample.reward) == (SampleStatus.ABORTED, None)
    assert sample.tokens.tolist() == [*PROMPT, 10, 11, 90, 91, 12]
    sample = codec.sample_from_message(codec.sample_to_message(sample))
    other = Script([13])
    sample = await run(play, other, sample)
    assert other.prompt_ids == [[*PROMPT, 10, 11, 90, 91, 12]]
    assert sample.tokens.tolist() == [*PROMPT, 10, 11, 90, 91, 12, 13]
    assert (sample.status, sample.loss_mask.tolist()) == (
        SampleStatus.COMPLETED,
        [1, 1, 0, 0, 1, 1],
    )
    assert [turn["by"] for turn in sample.metadata[TURNS]] == ["model", "environment", "model"]


async def test_a_drain_does_not_wait_for_a_tool() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        await asyncio.sleep(60)

    runner = scripted_runner(play, Script([10]))
    playing = asyncio.create_task(runner(Prompt(0, "?"), PROMPT, Sample(0), PARAMS))
    await asyncio.sleep(0.05)
    runner.generator.draining.set()
    sample = await asyncio.wait_for(playing, 5)
    assert (sample.status, sample.tokens.tolist()) == (SampleStatus.ABORTED, [*PROMPT, 10])


async def test_an_observation_that_differs_the_second_time_drops_later_turns() -> None:
    async def second(episode: Episode) -> None:
        await episode.generate()
        episode.observe([95])
        await episode.generate()

    before = await run(ask_twice, Script([10, 11], [12]))
    before.status = SampleStatus.ABORTED
    after = await run(second, Script([13]), before)
    assert after.tokens.tolist() == [*PROMPT, 10, 11, 95, 13]
    assert (after.loss_mask.tolist(), len(after.metadata[TURNS])) == ([1, 1, 0, 1], 3)
    after.check_tokens()


async def test_a_turn_in_place_of_an_observation_drops_later_turns() -> None:
    async def second(episode: Episode) -> None:
        await episode.generate()
        await episode.generate()

    before = await run(ask_twice, Script([10, 11], [12]))
    before.status = SampleStatus.ABORTED
    after = await run(second, Script([13]), before)
    assert after.tokens.tolist() == [*PROMPT, 10, 11, 13]
    after.check_tokens()


async def test_asking_does_not_change_the_sample() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        assert (await episode.ask([70])).tokens == [71, 72]

    engine = Script([10], [71, 72])
    sample = await run(play, engine)
    assert engine.prompt_ids[1] == [70]
    assert sample.tokens.tolist() == [*PROMPT, 10]


async def test_the_environment_may_set_the_reward() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        episode.reward({"score": 0.5, "moves": 3})

    sample = await run(play, Script([10]))
    assert (sample.reward, sample.reward_parts) == (0.5, {"score": 0.5, "moves": 3.0})


async def crash(episode: Episode) -> None:
    await episode.generate()
    raise KeyError("board")


async def hang(episode: Episode) -> None:
    await episode.generate()
    await asyncio.sleep(60)


async def nothing(episode: Episode) -> None:
    return


async def objects(episode: Episode) -> None:
    await episode.generate()
    episode.metadata["board"] = object()


async def halves(episode: Episode) -> None:
    await episode.generate()
    episode.metadata["a"] = "\ud83d"


async def nests(episode: Episode) -> None:
    await episode.generate()
    value: list[Any] = []
    for _ in range(900):
        value = [value]
    episode.metadata["a"] = value


async def nests_and_ends(episode: Episode) -> None:
    await nests(episode)
    episode.observe([1] * 1000)


async def pays_too_much(episode: Episode) -> None:
    await episode.generate()
    episode.reward(1e39)


async def pays_a_turn_too_much(episode: Episode) -> None:
    await episode.generate()
    episode.turn_reward(1e39)


async def complains(episode: Episode) -> None:
    raise ValueError("no \ud83d")


async def nonsense(episode: Episode) -> None:
    await episode.generate()
    episode.reward("good")  # type: ignore[arg-type]


async def tampers(episode: Episode) -> None:
    await episode.generate()
    episode.sample.response_length += 1


@pytest.mark.parametrize(("play", "error"), [
    (crash, "mine.py:play raised KeyError: 'board'"),
    (hang, "mine.py:play took more than 0.05 s outside of the engine"),
    (nothing, "mine.py:play ended before the model generated a token"),
    (objects, r"left a broken sample: samples\[0\].metadata.board: object has no form in JSON"),
    (halves, r"left a broken sample: samples\[0\].metadata.a: half of a surrogate pair"),
    (nests, r"left a broken sample: samples\[0\].metadata.a\[0\].*: nested more than 64 deep"),
    (nests_and_ends, r"left a broken sample: samples\[0\].metadata.a\[0\].*: nested more than"),
    (pays_too_much, "raised RewardError: the reward is 1e.39, expected a finite number of at most"),
    (pays_a_turn_too_much, "raised InputError: turn_reward is 1e.39, expected a finite number of"),
    (complains, "raised ValueError: no \ufffd"),
    (nonsense, "raised RewardError: the reward is str 'good', expected a number"),
    (tampers, r"left a broken sample: samples\[0\].lossMask: 1 entries for 2 response tokens"),
])  # fmt: skip
async def test_a_function_that_goes_wrong_fails_its_sample_with_the_reason(
    play: Any, error: str
) -> None:
    sample = await scripted_runner(play, Script([10]), seconds=0.05)(
        Prompt(0, "?"), PROMPT, Sample(0), PARAMS
    )
    assert sample.status is SampleStatus.FAILED
    assert sample.trainable_tokens == 0
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(sample.error)
    sample.check()
    json.dumps(sample.metadata)


async def test_time_at_the_engine_does_not_count_for_the_function() -> None:
    class Slow(Script):
        async def generate(self, *arguments: Any, **options: Any) -> Generation:
            await asyncio.sleep(0.2)
            return await super().generate(*arguments, **options)

    sample = await scripted_runner(ask_twice, Slow([10], [11]), seconds=0.1)(
        Prompt(0, "?"), PROMPT, Sample(0), PARAMS
    )
    assert sample.status is SampleStatus.COMPLETED


async def test_a_prompt_that_the_engine_refuses_fails_its_sample() -> None:
    sample = await run(ask_twice, Script(PromptRefusedError("too long")))
    assert (sample.status, sample.error) == (SampleStatus.FAILED, "mine.py:play too long")


async def test_a_lost_engine_does_not_fail_the_function() -> None:
    async def swallows(episode: Episode) -> None:
        try:
            await episode.generate()
        except Exception as error:
            episode.metadata["error"] = str(error)

    with pytest.raises(EngineError, match="gone"):
        await run(swallows, Script(EngineError("gone")))
