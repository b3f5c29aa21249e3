"""Streams of a turn while the engine generates it, read by the clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from sluice.engines.protocol import EngineError, OnPart
from sluice.samples.sample import SampleStatus, WeightSpan
from sluice_rollout import generate
from sluice_rollout.episode import Episode
from sluice_rollout.gateway.endpoint import Gateway
from tests.unit.gateway.gateway_tools import (
    CHAT_BODY,
    counter_value,
    open_registry,
    openai_client,
    play_episode,
    token_ids,
)
from tests.unit.rollout.scripted_engine import Broken, Script

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
RESPONSES_TOOL: Any = {"type": "function", "name": "add", "parameters": PARAMETERS}
MESSAGES_TOOL: Any = {"name": "add", "input_schema": PARAMETERS}
KINDS = ["chat", "completions", "responses", "messages"]


class Slow(Script):
    """A healthy engine that sends its answers in parts of four tokens.

    It goes on after the first part once `go_on` is set. `left` is set when a request is cancelled.
    """

    part_tokens = 4

    def __init__(self, *answers: Any) -> None:
        super().__init__(*answers)
        self.go_on, self.left = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.parts = 0

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        return True, ""

    async def rests(self) -> bool:
        return False

    async def paused_seconds(self) -> float:
        return 0.0

    async def _send_parts(self, tokens: list[int], on_part: OnPart | None) -> None:
        if on_part is None:
            return
        for start in range(0, len(tokens), self.part_tokens):
            on_part(self._generation(tokens[start : start + self.part_tokens], ""))
            self.parts += 1
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.left.set()
                raise


async def texts_of(kind: str, gateway: Gateway, **options: Any) -> AsyncGenerator[str, None]:
    """Yield the texts of a stream as a client of its API reads them."""
    if kind == "messages":
        base_url = gateway.base_url.removesuffix("/v1")
        async with (
            AsyncAnthropic(base_url=base_url, api_key=gateway.api_key, max_retries=0) as ai,
            ai.messages.stream(**CHAT_BODY, max_tokens=90, **options) as events,
        ):
            async for text in events.text_stream:
                yield text
        return
    async with openai_client(gateway, max_retries=0) as ai:
        if kind == "chat":
            async for chunk in await ai.chat.completions.create(
                **CHAT_BODY, stream=True, **options
            ):
                yield chunk.choices[0].delta.content or ""
        elif kind == "completions":
            async for part in await ai.completions.create(
                model="x", prompt="hi", stream=True, **options
            ):
                yield part.choices[0].text
        else:
            async for event in await ai.responses.create(
                model="x", input="hi", stream=True, **options
            ):
                if event.type == "response.failed":
                    raise openai.APIError(event.response.error.message, None, body=None)  # type: ignore[arg-type]
                yield getattr(event, "delta", "")


@pytest.mark.parametrize("kind", KINDS)
async def test_text_comes_while_the_engine_generates(kind: str, tmp_path: Path) -> None:
    engine = Slow(token_ids("Hello, wörld!"))
    parts: list[tuple[str, int]] = []

    async def play(episode: Episode) -> None:
        engine.go_on.clear()
        async for text in texts_of(kind, episode.gateway):
            if text:
                parts.append((text, engine.parts))
                engine.go_on.set()

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, engine)
    assert "".join(text for text, _ in parts) == "Hello, wörld!"
    assert parts[0] == ("Hell", 1)
    assert engine.parts == 4
    assert (sample.response, sample.status) == ("Hello, wörld!", SampleStatus.COMPLETED)
    assert sample.trainable_tokens == len(token_ids("Hello, wörld!"))


async def test_a_call_is_held_back_and_sent_as_a_call(tmp_path: Path) -> None:
    streamed: dict[str, Any] = {}

    async def play(episode: Episode) -> None:
        gateway = episode.gateway
        async with openai_client(gateway) as ai:
            chat: dict[str, Any] = CHAT_BODY | {"tools": [CHAT_TOOL], "stream": True}
            deltas = [c.choices[0].delta async for c in await ai.chat.completions.create(**chat)]
            call = next(delta.tool_calls[0] for delta in deltas if delta.tool_calls)
            text = "".join(delta.content or "" for delta in deltas)
            streamed["chat"] = text, call.function.name, json.loads(call.function.arguments)
            async with ai.responses.stream(model="x", input="hi", tools=[RESPONSES_TOOL]) as events:
                kinds = [event.type async for event in events]
                output: list[Any] = list((await events.get_final_response()).output)
            text_item, call_item = output
            arguments = json.loads(call_item.arguments)
            streamed["responses"] = text_item.content[0].text, call_item.name, arguments
            assert kinds.index("response.output_text.delta") < kinds.index(
                "response.function_call_arguments.delta"
            )
        url = gateway.base_url.removesuffix("/v1")
        async with AsyncAnthropic(base_url=url, api_key=gateway.api_key) as claude:
            tools: Any = [MESSAGES_TOOL]
            async with claude.messages.stream(**CHAT_BODY, max_tokens=90, tools=tools) as events:
                blocks: list[Any] = list((await events.get_final_message()).content)
            said, used = blocks
            streamed["messages"] = said.text, used.name, used.input

    engine = Slow(*[token_ids(f"Let me see.\n{CALL}")] * 3)
    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, engine, tokens=900)
    assert sample.error == ""
    expected = ("Let me see.", "add", {"a": 1, "b": 2})
    assert streamed == dict.fromkeys(("chat", "responses", "messages"), expected)


async def test_a_streamed_response_is_continued_in_its_episode_only(tmp_path: Path) -> None:
    ids: list[str] = []
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            if ids:
                with pytest.raises(openai.BadRequestError, match="this episode has no response"):
                    await ai.responses.create(model="x", input="and", previous_response_id=ids[0])
            async with ai.responses.stream(model="x", input="hi") as events:
                ids.append((await events.get_final_response()).id)
            again = await ai.responses.create(model="x", input="and", previous_response_id=ids[-1])
            texts.append(again.output_text)

    async with open_registry(tmp_path) as registry:
        for _ in range(2):
            sample = await play_episode(registry, play, Slow(token_ids("one"), token_ids("two")))
            assert (sample.error, sample.branches, sample.trainable_tokens) == ("", [], 6)
    assert texts == ["two", "two"]


async def test_a_call_that_cannot_be_read_is_sent_as_text_at_the_end(tmp_path: Path) -> None:
    texts: list[str] = []
    broken = 'Well. <tool_call>{"name": </tool_call>'

    async def play(episode: Episode) -> None:
        texts.extend([t async for t in texts_of("chat", episode.gateway, tools=[CHAT_TOOL])])

    async with open_registry(tmp_path) as registry:
        await play_episode(registry, play, Slow(token_ids(broken)))
    assert "".join(texts) == broken


async def test_usage_comes_last_if_asked_for_and_counts_cached_tokens(tmp_path: Path) -> None:
    class Caching(Slow):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            answer = await super().generate(*arguments, **options)
            object.__setattr__(answer, "cached_tokens", 7)
            return answer

    usages: list[Any] = []

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            for options in ({}, {"stream_options": {"include_usage": True}}):
                body: dict[str, Any] = CHAT_BODY | {"stream": True} | options
                chunks = [chunk async for chunk in await ai.chat.completions.create(**body)]
                usages.append([chunk.usage for chunk in chunks if chunk.usage])
            assert chunks[-1].choices == []

    before = counter_total()
    async with open_registry(tmp_path) as registry:
        await play_episode(registry, play, Caching(*[token_ids("hello")] * 2))
    assert usages[0] == []
    (usage,) = usages[1]
    assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (5, 7)
    assert counter_total() == before + 14


def counter_total() -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value("sluice_rollout_cached_tokens_total") or 0.0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_that_breaks_off_continues_with_the_tokens_that_were_sent(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "_PAUSES_AFTER_ERRORS", (0.0, 0.0))
    begun = token_ids("Hello, w")
    engine = Slow(Broken(begun, EngineError("the connection ended")), token_ids("orld!"))
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        texts.extend([text async for text in texts_of(kind, episode.gateway)])

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, engine)
    assert "".join(texts) == "Hello, world!"
    assert sample.response == "Hello, world!"
    assert engine.prompt_ids[1] == engine.prompt_ids[0] + begun
    assert sample.weight_versions == [WeightSpan(0, 0, 13)]
    sample.check_tokens()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_dies_ends_a_stream_with_an_error(kind: str, tmp_path: Path) -> None:
    class Mortal(Slow):
        async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
            return False, "/health: refused"

    texts: list[str] = []

    async def read(gateway: Gateway) -> None:
        async for text in texts_of(kind, gateway):
            texts.append(text)

    async def play(episode: Episode) -> None:
        with pytest.raises((openai.APIError, anthropic.APIStatusError), match="gone"):
            await read(episode.gateway)

    failed = counter_value("requests", endpoint=_endpoint(kind), outcome="unavailable")
    async with open_registry(tmp_path) as registry:
        engine = Mortal(Broken(token_ids("Hell"), EngineError("gone")))
        with pytest.raises(EngineError, match="gone"):
            await play_episode(registry, play, engine)
    assert "".join(texts) == "Hell"
    now = counter_value("requests", endpoint=_endpoint(kind), outcome="unavailable")
    assert now == failed + 1


def _endpoint(kind: str) -> str:
    return "chat/completions" if kind == "chat" else kind


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refusal_before_the_first_text_has_its_status(kind: str, tmp_path: Path) -> None:
    async def play(episode: Episode) -> None:
        with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)) as refused:
            async for _ in texts_of(kind, episode.gateway):
                pass
        assert refused.value.status_code == 503

    async with open_registry(tmp_path) as registry:
        with pytest.raises(EngineError, match="gone"):
            await play_episode(registry, play, Script(EngineError("gone")))


async def test_a_client_that_leaves_amid_a_stream_gets_the_same_tokens_again(
    tmp_path: Path,
) -> None:
    engine = Slow(token_ids("Hello, world!"), token_ids("o, world!"))
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        engine.go_on.clear()
        stream = texts_of("chat", episode.gateway)
        while not await anext(stream):
            pass
        await stream.aclose()
        async with asyncio.timeout(30):
            await engine.left.wait()
        engine.go_on.set()
        texts.extend([text async for text in texts_of("chat", episode.gateway)])

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, engine)
    assert engine.prompt_ids[1] == engine.prompt_ids[0] + token_ids("Hell")
    assert "".join(texts) == sample.response == "Hello, world!"
    assert (sample.branches, sample.trainable_tokens) == ([], 13)


async def test_a_weight_update_amid_a_stream(tmp_path: Path) -> None:
    class Updated(Slow):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            answer = await super().generate(*arguments, **options)
            self.version += 1
            return answer

    texts: list[str] = []

    async def play(episode: Episode) -> None:
        texts.extend([text async for text in texts_of("chat", episode.gateway)])

    cut_off = " ".join(map(str, token_ids("Hello, ")))
    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, Updated(cut_off, token_ids("world!")))
    assert "".join(texts) == "Hello, world!"
    assert sample.weight_versions == [WeightSpan(0, 0, 7), WeightSpan(1, 7, 13)]


async def test_an_error_that_nobody_expects_ends_a_stream_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(gateway: Gateway) -> None:
        async for _ in texts_of("chat", gateway):
            pass

    async def play(episode: Episode) -> None:
        with pytest.raises(openai.APIError, match="KeyError"):
            await read(episode.gateway)

    async with open_registry(tmp_path) as registry:
        await play_episode(registry, play, Slow(Broken(token_ids("Hell"), KeyError("oops"))))


async def test_tokens_that_an_aborted_request_forgets_stay_sampled(tmp_path: Path) -> None:
    class Forgetful(Slow):
        """Its first request is aborted while it is queued again: the answer has no tokens."""

        async def generate(self, *arguments: Any, **options: Any) -> Any:
            answer = await super().generate(*arguments, **options)
            return answer if self.prompt_ids[1:] else self._generation([], "abort")

    texts: list[str] = []

    async def play(episode: Episode) -> None:
        texts.extend([text async for text in texts_of("chat", episode.gateway)])

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(
            registry, play, Forgetful(token_ids("Hello, "), token_ids("world!"))
        )
    assert "".join(texts) == sample.response == "Hello, world!"
