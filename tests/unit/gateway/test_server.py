"""Requests of OpenAI's client to the gateway: keys, attacks, mistakes, settings."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any
from unittest.mock import patch

import openai
import pytest

from sluice.engines.protocol import EngineError
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import TURNS
from sluice_rollout.episode import Episode
from sluice_rollout.gateway import endpoint, server
from sluice_rollout.gateway.endpoint import Gateway
from tests.unit.gateway.gateway_tools import (
    CHAT_BODY,
    counter_value,
    episode_runner,
    open_registry,
    openai_client,
    play_episode,
    post,
    token_ids,
)
from tests.unit.rollout.scripted_engine import PARAMS, Script

PATHS = ["chat/completions", "completions", "responses"]


async def test_clients_of_episodes_read_the_certificates_once(tmp_path: Path) -> None:
    texts: list[str | None] = []

    async def play(episode: Episode) -> None:
        async with episode.gateway.openai() as ai:
            texts.append((await ai.chat.completions.create(**CHAT_BODY)).choices[0].message.content)

    endpoint.certificates.cache_clear()
    with patch.object(ssl, "create_default_context", wraps=ssl.create_default_context) as read:
        async with open_registry(tmp_path) as registry:
            for answer in ("one", "two"):
                await play_episode(registry, play, Script(token_ids(answer)))
    assert texts == ["one", "two"]
    assert read.call_count == 1


async def test_the_three_interfaces_give_the_same_answer(tmp_path: Path) -> None:
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            answer = await ai.chat.completions.create(**CHAT_BODY)
            texts.append(answer.choices[0].message.content or "")
            texts.append((await ai.completions.create(model="x", prompt="hi")).choices[0].text)
            response = await ai.responses.create(model="x", input="hi")
            texts.append(response.output_text)
            again = await ai.responses.create(
                model="x", input="and", previous_response_id=response.id
            )
            texts.append(again.output_text)
            texts.extend([model.id async for model in ai.models.list()])

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(
            registry, play, Script(*[token_ids(text) for text in ("one", "two", "3", "four")])
        )
    assert texts == ["one", "two", "3", "four", "model"]
    assert (sample.status, sample.metadata["answer"]) == (SampleStatus.COMPLETED, "four")
    assert [turn["length"] for turn in sample.metadata[TURNS] if turn["by"] == "model"] == [1, 4]


@pytest.mark.parametrize(
    ("limits", "grows", "turns"),
    [
        pytest.param({"turns": 3}, True, 3, id="turns of one branch"),
        pytest.param({"turns": 3}, False, 3, id="turns of several"),
        pytest.param({"branches": 2}, False, 2, id="branches"),
        pytest.param({"branches": 1}, True, 5, id="one branch may grow"),
        pytest.param({}, False, 5, id="room for more than that"),
    ],
)
async def test_an_episode_is_truncated_at_its_limits(
    limits: dict[str, int], grows: bool, turns: int, tmp_path: Path
) -> None:
    answered: list[str] = []

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            messages: list[Any] = []
            for number in range(5):
                messages = (
                    [*messages, {"role": "user", "content": "hi"}]
                    if grows
                    else [{"role": "user", "content": f"question {number}"}]
                )
                answer = await ai.chat.completions.create(model="any", messages=messages)
                messages.append(answer.choices[0].message)
                answered.append(answer.choices[0].message.content or "")

    async with open_registry(tmp_path, rollout__limits=limits) as registry:
        sample = await play_episode(registry, play, Script(*[token_ids("one")] * 5), tokens=200)
    assert len(answered) == turns
    assert sample.status is (SampleStatus.COMPLETED if turns == 5 else SampleStatus.TRUNCATED)


async def test_a_turn_has_its_limit(tmp_path: Path) -> None:
    finishes: list[str] = []

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            answer = await ai.chat.completions.create(**CHAT_BODY, max_tokens=50)
            finishes.append(answer.choices[0].finish_reason)

    async with open_registry(tmp_path, rollout__limits={"turnTokens": 3}) as registry:
        sample = await play_episode(registry, play, Script(token_ids("hello")))
    assert (finishes, sample.trainable_tokens) == (["length"], 3)


@pytest.mark.parametrize("kind", ["chat", "completions", "responses"])
async def test_a_stream_is_the_answer_in_the_clients_own_events(kind: str, tmp_path: Path) -> None:
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            if kind == "chat":
                options: Any = {"stream": True, "stream_options": {"include_usage": True}}
                chunks = [c async for c in await ai.chat.completions.create(**CHAT_BODY, **options)]
                texts.extend(c.choices[0].delta.content or "" for c in chunks if c.choices)
                assert chunks[-1].usage.completion_tokens == 5
            elif kind == "completions":
                stream = await ai.completions.create(model="x", prompt="hi", stream=True)
                texts.extend([c.choices[0].text async for c in stream])
            else:
                async with ai.responses.stream(model="x", input="hi") as events:
                    texts.extend([getattr(e, "delta", "") async for e in events])
                    assert (await events.get_final_response()).output_text == "hello"

    async with open_registry(tmp_path) as registry:
        await play_episode(registry, play, Script(token_ids("hello")))
    assert "".join(texts) == "hello"


@pytest.mark.parametrize("path", PATHS)
async def test_only_the_episodes_key_opens_it_and_only_while_it_plays(
    path: str, tmp_path: Path
) -> None:
    opened: list[Gateway] = []

    async def play(episode: Episode) -> None:
        opened.append(gateway := episode.gateway)
        url, key = f"{gateway.base_url}/{path}", gateway.api_key
        name = key.split("-")[1]
        assert name == "3.0.0", "group, sample and attempt"
        for headers, query in [
            ({}, ""),
            ({}, f"?api_key={key}&key={key}"),
            ({"Authorization": key}, ""),
            ({"Authorization": "Bearer "}, ""),
            ({"Authorization": f"Bearer sk-{name}"}, ""),
            ({"Authorization": f"Bearer {key}x"}, ""),
            ({"Authorization": f"Bearer {key[:-1]}"}, ""),
        ]:
            code, error = await post(url + query, json=CHAT_BODY, headers=headers)
            assert (code, error["code"]) == (401, "invalid_api_key")

    async with open_registry(tmp_path) as registry:
        await play_episode(registry, play, Script())
        (gateway,) = opened
        with pytest.raises(openai.AuthenticationError, match="expired"):
            await openai_client(gateway).chat.completions.create(**CHAT_BODY)


async def test_a_key_opens_its_own_episode_alone(tmp_path: Path) -> None:
    both: dict[int, Gateway] = {}
    ready, answered = asyncio.Event(), asyncio.Event()

    async def play(episode: Episode) -> None:
        both[episode.sample.index] = episode.gateway
        if len(both) == 2:
            ready.set()
        await ready.wait()
        if episode.sample.index == 0:
            await openai_client(both[1]).chat.completions.create(**CHAT_BODY)
            answered.set()
        await answered.wait()

    async with open_registry(tmp_path) as registry:
        runner, params = (
            episode_runner(registry, play, Script(token_ids("hello"))),
            PARAMS | {"max_new_tokens": 100},
        )
        first, second = Sample(0), Sample(1)
        playing = [runner(Prompt(0, "?"), [1], sample, params) for sample in (first, second)]
        await asyncio.gather(*playing)
    assert (first.trainable_tokens, second.response_length) == (0, 5)


MALFORMED_REQUESTS = [
    pytest.param("chat/completions", {"data": b"{"}, 400, "not valid JSON", id="broken JSON"),
    pytest.param("chat/completions", {"data": b"\xff"}, 400, "not valid JSON", id="no text"),
    pytest.param("chat/completions", {"data": b"[" * 99999}, 400, "not valid JSON", id="deep JSON"),
    pytest.param("chat/completions", {"json": [1]}, 400, "JSON object", id="a list"),
    pytest.param("chat/completions", {"json": {}}, 400, "messages", id="no messages"),
    pytest.param(
        "chat/completions", {"json": CHAT_BODY | {"messages": [1]}}, 400, "role", id="no role"
    ),
    pytest.param(
        "chat/completions", {"json": CHAT_BODY | {"n": 2}}, 400, "branch", id="two answers"
    ),
    pytest.param("chat/completions", {"json": CHAT_BODY | {"stop": 1}}, 400, "stop", id="stop"),
    pytest.param(
        "chat/completions", {"json": CHAT_BODY | {"tools": [1]}}, 400, "tools", id="tools"
    ),
    pytest.param(
        "chat/completions",
        {"json": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}},
        400,
        "messages[0].content[0].image_url: expected a data URL",
        id="an image",
    ),
    pytest.param(
        "chat/completions",
        {"json": {"messages": [{"role": "user", "content": "\ud800"}]}},
        400,
        "surrogate",
        id="no Unicode",
    ),
    pytest.param(
        "chat/completions",
        {"data": b"{}", "headers": {"Content-Type": "application/json; charset=none"}},
        400,
        "not valid JSON",
        id="no such charset",
    ),
    pytest.param(
        "chat/completions",
        {"data": b"{}", "headers": {"Content-Encoding": "gzip"}},
        400,
        "not valid JSON",
        id="not compressed",
    ),
    pytest.param(
        "chat/completions",
        {"json": CHAT_BODY | {"tools": [{"type": "function", "function": {"name": 1}}]}},
        400,
        "tools",
        id="a tool without a name",
    ),
    pytest.param("completions", {"json": {"prompt": [-1]}}, 400, "prompt", id="negative id"),
    pytest.param("completions", {"json": {"prompt": [99999]}}, 400, "vocabulary", id="no such id"),
    pytest.param("responses", {"json": {"input": []}}, 400, "input", id="no input"),
    pytest.param(
        "responses",
        {"json": {"input": "x", "tools": [{"type": "web_search"}]}},
        400,
        "hosted",
        id="hosted tool",
    ),
    pytest.param(
        "responses",
        {"json": {"input": "x", "previous_response_id": "resp_1"}},
        400,
        "this id",
        id="unknown response",
    ),
    pytest.param("embeddings", {"json": {}}, 404, "Not Found", id="no such path"),
]


@pytest.mark.parametrize(("path", "options", "code", "message"), MALFORMED_REQUESTS)
async def test_a_malformed_request_is_refused_in_openais_format(
    path: str, options: dict[str, Any], code: int, message: str, tmp_path: Path
) -> None:
    options = dict(options)

    async def play(episode: Episode) -> None:
        gateway = episode.gateway
        headers = options.pop("headers", {}) | {"Authorization": f"Bearer {gateway.api_key}"}
        got, error = await post(f"{gateway.base_url}/{path}", headers=headers, **options)
        assert got == code
        assert message in error["message"]
        await openai_client(gateway).chat.completions.create(**CHAT_BODY)

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, Script(token_ids("hello")))
    assert (sample.error, sample.response) == ("", "hello")


async def test_a_huge_body_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_BYTES", 1000)

    async def play(episode: Episode) -> None:
        gateway = episode.gateway
        headers = {"Authorization": f"Bearer {gateway.api_key}"}
        code, _ = await post(f"{gateway.base_url}/completions", headers=headers, data=b" " * 10_000)
        assert code == 413

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, Script())
    assert "before the model generated" in sample.error


async def test_the_jobs_sampling_holds_and_a_clients_is_counted(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = []
    engine = Script(token_ids("hello"))
    generate = engine.generate

    async def note(rid: str, input_ids: list[int], sampling: dict[str, Any], **rest: Any) -> Any:
        requests.append(sampling)
        return await generate(rid, input_ids, sampling, **rest)

    engine.generate = note  # type: ignore[method-assign]

    async def play(episode: Episode) -> None:
        await openai_client(episode.gateway).chat.completions.create(
            **CHAT_BODY, temperature=0.2, max_tokens=3, stop=["x"], seed=1
        )

    before = counter_value("overridden_settings", setting="temperature")
    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, engine)
    (sampling,) = requests
    assert (sampling["temperature"], sampling["max_new_tokens"], sampling["stop"]) == (
        1.0,
        3,
        ["x"],
    )
    assert (sample.response, sample.status) == ("hel", SampleStatus.TRUNCATED)
    assert counter_value("overridden_settings", setting="temperature") == before + 1


async def test_a_history_that_does_not_fit_ends_the_episode_as_truncated(tmp_path: Path) -> None:
    async def play(episode: Episode) -> None:
        messages: list[Any] = list(CHAT_BODY["messages"])
        while True:
            answer = await openai_client(episode.gateway).chat.completions.create(
                model="x", messages=messages
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "more"}]

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, Script(*[token_ids("hello")] * 9), tokens=120)
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert sample.trainable_tokens >= 10


async def test_a_client_that_hangs_up_gets_its_turn_when_it_asks_again(tmp_path: Path) -> None:
    class Slow(Script):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            if not self.prompt_ids:
                self.prompt_ids.append([])
                await asyncio.sleep(60)
            return await super().generate(*arguments, **options)

    engine = Slow(token_ids("hello"))

    async def play(episode: Episode) -> None:
        ai = openai_client(episode.gateway, timeout=0.3, max_retries=1)
        answer = await ai.chat.completions.create(**CHAT_BODY)
        assert answer.choices[0].message.content == "hello"

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, engine)
    assert (sample.error, sample.response, len(engine.prompt_ids)) == ("", "hello", 2)


async def test_a_lost_engine_does_not_fail_the_sample(tmp_path: Path) -> None:
    async def play(episode: Episode) -> None:
        with pytest.raises(openai.InternalServerError, match="gone"):
            await openai_client(episode.gateway).chat.completions.create(**CHAT_BODY)

    async with open_registry(tmp_path) as registry:
        with pytest.raises(EngineError, match="gone"):
            await play_episode(registry, play, Script(EngineError("gone")))


async def test_a_missing_parser_fails_only_episodes_that_use_the_gateway(
    tmp_path: Path,
) -> None:
    async def play(episode: Episode) -> None:
        await openai_client(episode.gateway).chat.completions.create(**CHAT_BODY)

    async def alone(episode: Episode) -> None:
        await episode.generate()

    changes: dict[str, Any] = {
        "rollout__engine": "vllm",
        "rollout__engineArgs": {"toolCallParser": "glm45"},
    }
    async with open_registry(tmp_path, **changes) as registry:
        assert (
            "'glm45' is not installed in the worker"
            in (await play_episode(registry, play, Script())).error
        )
        assert (await play_episode(registry, alone, Script([10]))).error == ""


async def test_an_episode_is_played_by_a_program_or_by_its_function(tmp_path: Path) -> None:
    async def play(episode: Episode) -> None:
        await openai_client(episode.gateway).chat.completions.create(**CHAT_BODY)
        await episode.generate()

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, Script(token_ids("hello")))
    assert "a program at episode.gateway plays this episode" in sample.error
