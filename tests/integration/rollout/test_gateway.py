"""Programs of the OpenAI API at a real engine's gateway: what it sampled is what is trained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.protocol import Generation
from sluice.engines.sglang.client import Client
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import TURNS
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout.episode import Episode, Play
from sluice_rollout.gateway.registry import EpisodeRegistry
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.user_functions.runner import EpisodeRunner
from sluice_rollout.worker import WorkerError
from tests.integration.engines import Sglang, distance, log_probs, tolerance
from tests.integration.rendezvous_server import DEADLINE
from tests.integration.rollout import talkative as words
from tests.integration.rollout.pods import Pod, Services, job, leases
from tests.integration.rollout.talkative import client_of, play, play_streaming, save_talkative
from tests.integration.rollout.test_generation import generator
from tests.integration.weights.conftest import make_sender as make_sender
from tests.integration.weights.tools import publish
from tests.tools import missing

AGENTS_PYTHON = Path(
    os.environ.get("SLUICE_AGENTS_PYTHON") or Path(sys.prefix).parent / ".venv-agents/bin/python"
)
PARAMS = {"max_new_tokens": 900, "temperature": 1.0, "ignore_eos": True}
# A tool call ends its turn.
CALLING = PARAMS | {"ignore_eos": False, "stop_token_ids": words.CALLS}
READY = pb.TakeBatchResponse.STATE_READY
AGENT = {
    "rollout__function": "tests.integration.rollout.talkative.play",
    "rollout__sampling__maxResponseTokens": 2500,
    "rollout__partial__enabled": True,
    "rollout__mode": "async",
    "rollout__maxStaleness": 1,
}


@pytest.fixture(scope="session")
def talkative(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talkative(model, tmp_path_factory.mktemp("talkative") / "model")


class RequestLog:
    """Records requests to the engine: the tokens of each, and its answer."""

    def __init__(self, engine: Client) -> None:
        self.answers: list[tuple[list[int], Generation]] = []
        self._ask = engine.generate
        engine.generate = self.generate  # type: ignore[method-assign]

    async def generate(
        self, rid: str, input_ids: list[int], *arguments: Any, **options: Any
    ) -> Generation:
        answer = await self._ask(rid, input_ids, *arguments, **options)
        self.answers.append((input_ids, answer))
        return answer


@contextlib.asynccontextmanager
async def runner_at_gateway(
    function: Play, engine: Client, talkative: Path, directory: Path
) -> AsyncIterator[EpisodeRunner]:
    """Open a gateway, with a runner whose episodes use it."""
    settings = AGENT | {"rollout__sampling__maxResponseTokens": 900}
    spec = job(directory, talkative, **settings).spec
    encoder = PromptEncoder(spec, talkative)
    async with EpisodeRegistry.for_job(spec, encoder) as registry:
        yield EpisodeRunner(
            function,
            "agent",
            generator(engine, talkative),
            encoder.tokenizer,
            60.0,
            None,
            registry.open_gateway,
        )


def check(sample: Sample, weights: dict[int, Path]) -> None:
    """Check that trained tokens have the log-probs of the weights that their spans name."""
    sample.check()
    mask = sample.loss_mask.astype(bool)
    for version, model in weights.items():
        at = mask & sample.sampled_by(version).astype(bool)
        expected = log_probs(model, sample.tokens.tolist(), sample.response_length)
        reported = sample.rollout_log_probs[at].tolist()
        expected = [e for e, sampled in zip(expected, at, strict=True) if sampled]
        assert distance(reported, expected) < tolerance()


def check_tokens(sample: Sample, log: RequestLog) -> None:
    """Check that the sample is three turns, as the engine saw and sampled them."""
    tokens = sample.tokens.tolist()
    at, learned = sample.prompt_length, []
    for turn in sample.metadata[TURNS]:
        if turn["by"] == "model":
            learned.append((tokens[:at], tokens[at : at + turn["length"]]))
        at += turn["length"]
    assert learned == [(prompt, answer.tokens) for prompt, answer in log.answers]
    assert len(learned) == 3
    assert sample.trainable_tokens == sum(len(answer.tokens) for _, answer in log.answers)


@pytest.mark.parametrize("function", [play, play_streaming], ids=["whole", "streaming"])
async def test_three_turns_with_two_tools_are_the_tokens_that_the_engine_sampled(
    function: Play, engine: Client, model: Path, talkative: Path, tmp_path: Path
) -> None:
    log = RequestLog(engine)
    async with runner_at_gateway(function, engine, talkative, tmp_path) as runner:
        sample = await runner(Prompt(0, "?"), [5], Sample(0, reward=1.0), PARAMS)
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, ""), "the last turn was cut"
    check_tokens(sample, log)
    assert sample.metadata["messages"] > 6
    check(sample, {0: model})


@pytest.mark.parametrize("arguments", ["chat", "chat stream", "responses", "responses stream"])
async def test_a_program_of_openai_agents_plays_unchanged(
    arguments: str, engine: Client, model: Path, talkative: Path, tmp_path: Path
) -> None:
    """The program has a separate virtual environment: SGLang needs another version of `openai`."""
    if not AGENTS_PYTHON.exists():
        missing("needs openai-agents: make agents")

    async def play(episode: Episode) -> None:
        gateway = episode.gateway
        address = {"OPENAI_BASE_URL": gateway.base_url, "OPENAI_API_KEY": gateway.api_key}
        program = await asyncio.create_subprocess_exec(
            AGENTS_PYTHON,
            Path(words.__file__).with_name("agents_sdk.py"),
            *arguments.split(),
            env=os.environ | address,
            stdout=subprocess.PIPE,
        )
        output, _ = await program.communicate()
        assert output == b"three turns\n"

    log = RequestLog(engine)
    async with runner_at_gateway(play, engine, talkative, tmp_path) as runner:
        sample = await runner(Prompt(0, "?"), [5], Sample(0, reward=1.0), CALLING)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    check_tokens(sample, log)
    check(sample, {0: model})


async def test_all_branches_of_a_tree_are_the_tokens_that_the_engine_sampled(
    engine: Client, model: Path, talkative: Path, tmp_path: Path
) -> None:
    """Two sub-agents from the same beginning, and a history that is told anew."""

    async def tree(episode: Episode) -> None:
        async with client_of(episode) as client:
            history: list[Any] = [{"role": "user", "content": "w0002"}]
            first = await words.said(client, history, stream=False, max_tokens=20)
            history += [first.model_dump(), {"role": "user", "content": "w0005"}]
            branches = [words.said(client, history, stream=False, max_tokens=n) for n in (9, 15)]
            await asyncio.gather(*branches)
            summary = [{"role": "user", "content": "w0008 w0011"}]
            await words.said(client, summary, stream=False, max_tokens=5)

    log = RequestLog(engine)
    async with runner_at_gateway(tree, engine, talkative, tmp_path) as runner:
        sample = await runner(Prompt(0, "?"), [5], Sample(0, reward=1.0), PARAMS)
    sample = codec.sample_from_message(codec.sample_to_message(sample))
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert [int(sequence.loss_mask.sum()) for sequence in sample.sequences] == [20 + 15, 9, 5]
    learned = []
    for sequence in sample.sequences:
        expected = log_probs(model, sequence.tokens.tolist(), sequence.response_length)
        trains = sequence.loss_mask.astype(bool)
        reported = sequence.rollout_log_probs[trains].tolist()
        expected = [e for e, trained in zip(expected, trains, strict=True) if trained]
        assert distance(reported, expected) < tolerance()
        learned += sequence.tokens[sequence.prompt_length :][trains].tolist()
    assert sorted(learned) == sorted(token for _, answer in log.answers for token in answer.tokens)


async def test_a_weight_update_in_the_middle_of_a_turn(
    make_services: Callable[..., Services],
    engine: Client,
    sglang: Sglang,
    model: Path,
    other_model: Path,
    talkative: Path,
    make_sender: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client waits, and its turn continues from the tokens that it has."""
    monkeypatch.setattr(words, "TURN", 250)
    services = make_services(**AGENT, model__path=str(talkative))
    async with (
        await services.start_buffer_with_batch() as client,
        services.working(engine) as (worker, end),
    ):
        await leases(worker, 4)
        await sglang.generated(8 * 60)
        await publish(make_sender(timeoutSeconds=30), 1, other_model)
        await client.commit(1)
        assert (await client.take(2, wait=60)).state == READY
        groups = [codec.group_from_message(g) for g in await client.shard(2)]
        await end()
    samples = [sample for group in groups for sample in group.samples]
    assert {span.version for s in samples for span in s.weight_versions} == {0, 1}
    for sample in samples:
        assert sample.trainable_tokens == 3 * 250
        check(sample, {0: model, 1: other_model})


async def test_turns_of_a_drained_episode_are_found_by_its_next_attempt(
    engine: Client, sglang: Sglang, model: Path, talkative: Path, tmp_path: Path
) -> None:
    log = RequestLog(engine)

    async def long_turns(episode: Episode) -> None:
        async with client_of(episode) as client:
            messages: list[Any] = [{"role": "user", "content": "w0002"}]
            for tokens in (20, 600):
                message = await words.said(client, messages, stream=False, max_tokens=tokens)
                messages += [message.model_dump(), {"role": "user", "content": "w0005"}]

    async with runner_at_gateway(long_turns, engine, talkative, tmp_path) as runner:
        running = asyncio.create_task(runner(Prompt(0, "?"), [5], Sample(0), PARAMS))
        await sglang.generated(60)
        runner.generator.draining.set()
        await engine.abort()
        sample = codec.sample_from_message(codec.sample_to_message(await running))
    assert sample.status is SampleStatus.ABORTED
    before = sample.tokens.tolist()
    assert 20 < sample.response_length < 620
    async with runner_at_gateway(long_turns, engine, talkative, tmp_path) as another:
        await another(Prompt(0, "?"), [5], sample, PARAMS)
    assert sample.tokens.tolist()[: len(before)] == before
    assert (len(log.answers), sample.trainable_tokens) == (3, 620)
    sample.reward = 0.0
    check(sample, {0: model})


async def test_the_groups_of_an_engine_that_was_killed_are_leased_again(
    make_services: Callable[..., Services], sglang: Sglang, model: Path, talkative: Path,
    tmp_path: Path, engine: Client, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(words, "TURN", 250)
    mortal = Sglang(model, tmp_path / "log")
    try:
        await asyncio.to_thread(mortal.wait_ready)
        mortal.reset()
        services = make_services(**AGENT, model__path=str(talkative))
        async with await services.start_buffer() as client:
            async with Client(mortal.url) as doomed:
                await doomed.wait_ready(30.0)
                async with services.worker(doomed) as (worker, membership):
                    work = asyncio.create_task(worker.run(asyncio.Event()))
                    await asyncio.wait_for(membership.connected.wait(), 10)
                    await services.rendezvous.serve(0)
                    await leases(worker, 4)
                    await mortal.generated(8 * 40)
                    mortal.kill()
                    with pytest.raises(WorkerError, match=f"engine {mortal.url}"):
                        await asyncio.wait_for(work, 60)
            assert (await client.stats()).leases == 0
            async with services.working(engine) as (_, end):
                assert (await client.take(1, wait=60)).state == READY
                groups = [codec.group_from_message(g) for g in await client.shard(1)]
                await end()
    finally:
        if mortal.process.poll() is None:
            mortal.kill()
    assert sorted(group.group_id for group in groups) == [0, 1, 2, 3]
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.trainable_tokens == 3 * 250
        check(sample, {0: model})


async def test_the_groups_of_a_worker_that_was_killed_are_leased_again(
    make_services: Callable[..., Services], start_pod: Callable[..., Pod], sglang: Sglang,
    engine: Client, talkative: Path, model: Path,
) -> None:  # fmt: skip
    services = make_services(**AGENT, model__path=str(talkative), buffer__leaseSeconds=10)
    async with await services.start_buffer() as client:
        worker = start_pod(services, sglang.url)
        async with asyncio.timeout(60):
            while "rollout-0" not in await services.rendezvous.ledger():
                await asyncio.sleep(0.1)
        await services.rendezvous.serve(0)
        async with asyncio.timeout(DEADLINE):
            while (await client.stats()).leases < 1:
                await asyncio.sleep(0.01)
        worker.kill()
        async with services.working(engine) as (_, end):
            assert (await client.take(1, wait=60)).state == READY
            groups = [codec.group_from_message(g) for g in await client.shard(1)]
            await end()
    assert sorted(group.group_id for group in groups) == [0, 1, 2, 3]
    for sample in (sample for group in groups for sample in group.samples):
        check(sample, {0: model})
