"""A generate function's conversation at the real engine: masks, log-probs and weight versions,
against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.api.groups.episode import EpisodeLimits
from sluice.engines.sglang.client import Client
from sluice.runtime import user_code
from sluice.samples.sample import Prompt, Sample, SampleStatus, WeightSpan
from sluice.samples.turns import TIMED_OUT
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout.episode import Episode, together, whole_group
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests.integration.engines import Sglang, call, distance, log_probs, tolerance
from tests.integration.rendezvous_server import DEADLINE
from tests.integration.rollout.pods import Services
from tests.integration.rollout.test_generation import PROMPT, generator

PARAMS = {"max_new_tokens": 900, "ignore_eos": True, "temperature": 0.8}
OBSERVATION = [20, 21, 22]
READY = pb.TakeBatchResponse.STATE_READY
FUNCTION = """
async def play(episode):
    await episode.generate(max_tokens=5)
    episode.observe("w0007 w0008")
    turn = await episode.generate(max_tokens=4)
    episode.metadata["last"] = turn.text
"""


async def talk(episode: Episode) -> None:
    """A turn of 30 tokens, an observation, and all the rest."""
    await episode.generate(max_tokens=30)
    episode.observe(OBSERVATION)
    await episode.generate(max_tokens=600)


def episode_runner(engine: Client, model: Path) -> EpisodeRunner:
    return EpisodeRunner(talk, "talk", generator(engine, model), None, 60.0)


def check(sample: Sample, model: Path, versions: list[tuple[Path, int, int]] | None = None) -> None:
    """Masks are exact; each trained token's log-prob is that of the weights that made it."""
    sample.check_tokens()
    assert sample.loss_mask.tolist() == [1] * 30 + [0] * 3 + [1] * 600
    assert sample.tokens[len(PROMPT) + 30 : len(PROMPT) + 33].tolist() == OBSERVATION
    assert not sample.rollout_log_probs[30:33].any()
    for weights, start, end in versions or [(model, 0, 633)]:
        expected = log_probs(weights, sample.tokens.tolist(), 633, 0.8)
        trained = [i for i in range(start, end) if sample.loss_mask[i]]
        assert (
            distance(sample.rollout_log_probs[trained].tolist(), [expected[i] for i in trained])
            < tolerance()
        )


async def test_both_turns_of_a_conversation_have_the_log_probs_of_the_whole_context(
    engine: Client, model: Path
) -> None:
    sample = await episode_runner(engine, model)(Prompt(0, "?"), PROMPT, Sample(0), PARAMS)
    assert sample.status is SampleStatus.TRUNCATED, "the last turn had no room to end"
    assert sample.weight_versions == [WeightSpan(0, 0, 633)]
    check(sample, model)


async def test_a_conversation_that_a_drain_cut_off_goes_on_in_the_middle_of_its_turn(
    engine: Client, model: Path, sglang: Sglang
) -> None:
    first = episode_runner(engine, model)
    running = asyncio.create_task(first(Prompt(0, "?"), PROMPT, Sample(0), PARAMS))
    await sglang.generated(60)
    first.generator.draining.set()
    await engine.abort()
    sample = codec.sample_from_message(codec.sample_to_message(await running))
    assert sample.status is SampleStatus.ABORTED
    assert 33 < sample.response_length < 633
    before = sample.tokens.tolist()
    await episode_runner(engine, model)(Prompt(0, "?"), PROMPT, sample, PARAMS)
    assert sample.tokens.tolist()[: len(before)] == before
    check(sample, model)


async def test_a_turn_that_the_episodes_time_cuts_off_keeps_what_the_engine_sampled(
    engine: Client, model: Path, sglang: Sglang
) -> None:
    async def play(episode: Episode) -> None:
        ends = asyncio.create_task(end_after(sglang, 60, episode))
        await talk(episode)
        await ends

    runner = episode_runner(engine, model)
    runner.play, runner.limits = play, EpisodeLimits(seconds=600.0)
    sample = await runner(Prompt(0, "?"), PROMPT, Sample(0), PARAMS)
    assert sample.status is SampleStatus.TRUNCATED
    assert "rollout.limits.seconds" in sample.metadata[TIMED_OUT]
    length = sample.response_length
    assert 33 < length < 633
    assert sample.weight_versions == [WeightSpan(0, 0, length)]
    expected = log_probs(model, sample.tokens.tolist(), length, 0.8)
    trained = [i for i in range(length) if sample.loss_mask[i]]
    assert len(trained) == length - len(OBSERVATION)
    assert (
        distance(sample.rollout_log_probs[trained].tolist(), [expected[i] for i in trained])
        < tolerance()
    )


async def end_after(sglang: Sglang, tokens: int, episode: Episode) -> None:
    """Let the time of an episode pass once the engine has generated some tokens."""
    await sglang.generated(tokens)
    episode.time_limit.over.set()


async def test_a_conversation_that_lives_through_an_update_knows_which_weights_made_which_token(
    engine: Client, model: Path, other_model: Path, sglang: Sglang
) -> None:
    running = asyncio.create_task(
        episode_runner(engine, model)(Prompt(0, "?"), PROMPT, Sample(0), PARAMS)
    )
    await sglang.generated(60)
    assert (await asyncio.to_thread(call, sglang.url + "/pause_generation", {"mode": "abort"}))[
        0
    ] == 200
    body = {"model_path": str(other_model), "weight_version": "1", "flush_cache": True}
    status, answer = await asyncio.to_thread(call, sglang.url + "/update_weights_from_disk", body)
    assert status == 200, answer
    assert (await asyncio.to_thread(call, sglang.url + "/continue_generation", {}))[0] == 200
    sample = await running
    assert [span.version for span in sample.weight_versions] == [0, 1]
    at = sample.weight_versions[0].end
    check(sample, model, [(model, 0, at), (other_model, at, 633)])


@pytest.fixture
def function(tmp_path: Path) -> str:
    user_code.load.cache_clear()
    (tmp_path / "talk.py").write_text(FUNCTION)
    return f"{tmp_path}/talk.py:play"


async def test_conversations_travel_from_lease_to_batch(
    make_services: Callable[..., Services], engine: Client, model: Path, function: str
) -> None:
    services = make_services(rollout__function=function)
    async with await services.start_buffer() as client, services.working(engine) as (_, end):
        assert (await client.take(1, wait=DEADLINE)).state == READY
        groups = [codec.group_from_message(g) for g in await client.shard(1)]
        await end()
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == 8
    for sample in samples:
        sample.check()
        assert sample.loss_mask.tolist() == [1] * 5 + [0] * 2 + [1] * 4
        expected = log_probs(model, sample.tokens.tolist(), 11)
        trained = [*range(5), *range(7, 11)]
        assert (
            distance(sample.rollout_log_probs[trained].tolist(), [expected[i] for i in trained])
            < tolerance()
        )
        assert sample.response.endswith(sample.metadata["last"])


async def test_all_turns_of_a_group_meet_the_same_engine_and_find_their_context_there(
    engine: Client, model: Path
) -> None:
    """Session affinity is by construction: a worker has one engine. Its prefix cache has the
    earlier turns."""
    sample = await episode_runner(engine, model)(
        Prompt(0, "?"), PROMPT, Sample(0), PARAMS | {"max_new_tokens": 60}
    )
    body = {
        "input_ids": sample.tokens.tolist(),
        "sampling_params": {"max_new_tokens": 1},
        "extra_key": "0",
    }
    _, answer = await asyncio.to_thread(call, engine.url + "/generate", body)
    assert answer["meta_info"]["cached_tokens"] >= len(sample.tokens) - 2


@whole_group
async def tree(episodes: list[Episode]) -> None:
    """A common start, from which every sample goes on; the first keeps the longer of
    two branches.
    """
    first, *others = episodes
    await first.generate(max_tokens=20)
    for other in others:
        other.adopt(first)
    branches = [first.branch(), first.branch()]
    await together(
        *(
            episode.generate(max_tokens=10 + 10 * i)
            for i, episode in enumerate([*branches, *others])
        )
    )
    first.adopt(branches[1])


async def test_samples_that_share_a_start_have_the_log_probs_of_their_own_context(
    engine: Client, model: Path
) -> None:
    runner = EpisodeRunner(tree, "tree", generator(engine, model), None, 60.0)
    samples = [Sample(0), Sample(1), Sample(2)]
    await runner.run_group(Prompt(0, "?"), PROMPT, samples, PARAMS)
    assert [sample.response_length for sample in samples] == [40, 50, 60]
    starts = {tuple(sample.tokens[: len(PROMPT) + 20].tolist()) for sample in samples}
    assert len(starts) == 1
    for sample in samples:
        sample.check_tokens()
        expected = log_probs(model, sample.tokens.tolist(), sample.response_length, 0.8)
        assert distance(sample.rollout_log_probs.tolist(), expected) < tolerance()
