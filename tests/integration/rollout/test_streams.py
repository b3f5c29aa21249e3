"""Streams at a real engine's gateway: what clients read is what the engine sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from sluice.api.groups.episode import EpisodeLimits
from sluice.engines.sglang.client import Client
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.episode import Episode
from tests.integration.engines import Sglang
from tests.integration.proxy import Drop, ProxiedRequest, Proxy
from tests.integration.rollout.talkative import client_of, save_talkative
from tests.integration.rollout.test_gateway import PARAMS, check, runner_at_gateway

MESSAGES: Any = [{"role": "user", "content": "w0002 w0005"}]
TOKENS = 300


@pytest.fixture(scope="module")
def talkative(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talkative(model, tmp_path_factory.mktemp("talkative") / "model")


async def chat_texts(episode: Episode, texts: list[str]) -> None:
    async with client_of(episode) as ai:
        body: dict[str, Any] = {"model": "any", "messages": MESSAGES, "max_tokens": TOKENS}
        async for chunk in await ai.chat.completions.create(**body, stream=True):
            texts.append(chunk.choices[0].delta.content or "")


async def responses_texts(episode: Episode, texts: list[str]) -> None:
    async with client_of(episode) as ai:
        async for event in await ai.responses.create(
            model="any", input="w0002 w0005", max_output_tokens=TOKENS, stream=True
        ):
            texts.append(getattr(event, "delta", ""))


async def messages_texts(episode: Episode, texts: list[str]) -> None:
    gateway = episode.gateway
    url = gateway.base_url.removesuffix("/v1")
    async with (
        AsyncAnthropic(base_url=url, api_key=gateway.api_key) as ai,
        ai.messages.stream(model="any", messages=MESSAGES, max_tokens=TOKENS) as events,
    ):
        async for text in events.text_stream:
            texts.append(text)


@pytest.mark.parametrize(
    "read", [chat_texts, responses_texts, messages_texts], ids=["chat", "responses", "messages"]
)
async def test_a_stream_comes_by_parts_with_the_engines_tokens(
    read: Any, engine: Client, model: Path, talkative: Path, tmp_path: Path
) -> None:
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        await read(episode, texts)

    async with runner_at_gateway(play, engine, talkative, tmp_path) as runner:
        sample = await runner(Prompt(0, "?"), [5], Sample(0, reward=1.0), PARAMS)
        decode = runner.generator.decode
    assert sample.error == ""
    assert sample.trainable_tokens == TOKENS
    assert len([text for text in texts if text]) > 5
    assert "".join(texts) == decode(sample.tokens[sample.prompt_length :].tolist())
    check(sample, {0: model})


async def test_a_stream_that_the_episodes_time_cuts_off_keeps_its_tokens(
    engine: Client, model: Path, talkative: Path, tmp_path: Path
) -> None:
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        async with client_of(episode) as ai:
            body: dict[str, Any] = {"model": "any", "messages": MESSAGES, "max_tokens": 800}
            async for chunk in await ai.chat.completions.create(**body, stream=True):
                texts.append(chunk.choices[0].delta.content or "")
                if "".join(texts):
                    episode.time_limit.over.set()
            await ai.chat.completions.create(**body)

    async with runner_at_gateway(play, engine, talkative, tmp_path) as runner:
        runner.limits = EpisodeLimits(seconds=600.0)
        sample = await runner(Prompt(0, "?"), [5], Sample(0, reward=1.0), PARAMS)
        decode = runner.generator.decode
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert 0 < sample.trainable_tokens < 800
    assert "".join(texts) == decode(sample.tokens[sample.prompt_length :].tolist())
    check(sample, {0: model})


async def test_a_lost_connection_amid_a_stream_repeats_no_token(
    sglang: Sglang, model: Path, talkative: Path, tmp_path: Path
) -> None:
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        await chat_texts(episode, texts)

    def drop_the_first(request: ProxiedRequest) -> Drop | None:
        return Drop(parts=3) if request.path == "/generate" and request.number == 1 else None

    async with Proxy(sglang.url, rules=[drop_the_first]) as proxy, Client(proxy.url) as engine:
        await engine.wait_ready(30.0)
        async with runner_at_gateway(play, engine, talkative, tmp_path) as runner:
            sample = await runner(Prompt(0, "?"), [5], Sample(0, reward=1.0), PARAMS)
            decode = runner.generator.decode
        # The worker also probes whether the engine is paused.
        asked = [r for r in proxy.requests if r.path == "/generate" and "rid" in r.body]
    prompts = [request.input_ids for request in asked]
    assert sample.error == ""
    response = sample.tokens[sample.prompt_length :].tolist()
    assert len(response) == sample.trainable_tokens == TOKENS
    assert prompts[1] == prompts[0] + response[: len(prompts[1]) - len(prompts[0])]
    assert len(prompts[1]) > len(prompts[0])
    assert "".join(texts) == decode(response)
    check(sample, {0: model})


async def test_the_engine_ends_the_request_of_a_client_that_leaves(
    engine: Client, sglang: Sglang, model: Path, talkative: Path, tmp_path: Path
) -> None:
    async def play(episode: Episode) -> None:
        async with client_of(episode) as ai:
            body: dict[str, Any] = {"model": "any", "messages": MESSAGES, "max_tokens": 850}
            async with await ai.chat.completions.create(**body, stream=True) as stream:
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break
            await sglang.idle(30.0)
            again = await ai.chat.completions.create(**body | {"max_tokens": 40})
            assert again.usage
            assert again.usage.prompt_tokens_details
            episode.metadata["length"] = again.usage.completion_tokens

    async with runner_at_gateway(play, engine, talkative, tmp_path) as runner:
        sample = await runner(Prompt(0, "?"), [5], Sample(0, reward=1.0), PARAMS)
    assert (sample.error, sample.branches) == ("", [])
    assert sample.metadata["length"] == sample.trainable_tokens
    check(sample, {0: model})
