"""Large requests do not block the event loop, and are not encoded or kept if they cannot fit."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from sluice.data.chat import PromptError
from sluice.engines.protocol import EngineError
from sluice.samples.sample import SampleStatus
from sluice_rollout.episode import Episode
from sluice_rollout.gateway.conversation import Turn
from sluice_rollout.gateway.history import Template, TextTooLongError
from sluice_rollout.gateway.large_requests import LARGE_CHARACTERS
from tests import chat
from tests.unit.gateway.gateway_tools import open_registry, openai_client, play_episode, token_ids
from tests.unit.rollout.scripted_engine import Script

WORDS = "word " * 10_000


class Watched:
    """A tokenizer that calls a function before it encodes a large text."""

    def __init__(self, tokenizer: Any, large: Any) -> None:
        self._tokenizer, self._large = tokenizer, large

    def encode(self, text: str, **options: Any) -> Any:
        if len(text) >= LARGE_CHARACTERS:
            self._large()
        return self._tokenizer.encode(text, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def test_the_loop_goes_on_while_a_large_text_is_encoded(tmp_path: Path) -> None:
    others = threading.Event()

    def wait_for_others() -> None:
        assert others.wait(30), "the event loop stands still"

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            large = asyncio.create_task(ai.chat.completions.create(model="x", messages=user(WORDS)))
            answer = await ai.chat.completions.create(model="x", messages=user("hi"))
            assert answer.choices[0].message.content == "small"
            others.set()
            assert (await large).choices[0].message.content == "large"

    async with open_registry(tmp_path, rollout__engineArgs={"contextLength": 100_000}) as registry:
        registry.encoder.tokenizer = Watched(registry.encoder.tokenizer, wait_for_others)
        sample = await play_episode(registry, play, Script(token_ids("small"), token_ids("large")))
    assert sample.error == ""


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_what_cannot_fit_is_refused_before_it_is_encoded(path: str, tmp_path: Path) -> None:
    def fail() -> None:
        raise AssertionError("it is encoded")

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway, max_retries=0) as ai:
            await ai.chat.completions.create(model="x", messages=user("hi"))
            if path == "completions":
                await ai.completions.create(model="x", prompt=WORDS * 2)
            await ai.chat.completions.create(model="x", messages=user(WORDS * 2))

    async with open_registry(tmp_path) as registry:
        registry.encoder.tokenizer = Watched(registry.encoder.tokenizer, fail)
        sample = await play_episode(registry, play, Script(token_ids("hi")))
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")


def turns() -> list[Turn]:
    gc.collect()
    return [item for item in gc.get_objects() if type(item) is Turn]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"prompt": [1] * 200_000}, id="more than the context"),
        pytest.param({"prompt": [1] * 4000}, id="no room for an answer"),
        pytest.param({"prompt": [1] * 100, "stop": [""]}, id="a wrong parameter"),
        pytest.param({"prompt": [99_999] * 100}, id="outside the vocabulary"),
        pytest.param({"prompt": [1] * 100}, id="the engine refuses"),
    ],
)
async def test_a_refused_request_keeps_nothing(body: dict[str, Any], tmp_path: Path) -> None:
    kept: list[int] = []

    async def play(episode: Episode) -> None:
        gateway = episode.gateway
        headers = {"Authorization": f"Bearer {gateway.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(5):
                async with session.post(f"{gateway.base_url}/completions", json=body) as answer:
                    assert answer.status in (400, 503)
                kept.append(len(turns()))
        raise openai.OpenAIError("enough")

    async with open_registry(tmp_path) as registry:
        engine = Script(*[EngineError("no")] * 20)
        try:
            await play_episode(registry, play, engine)
        except EngineError:
            assert body == {"prompt": [1] * 100}
    assert len(set(kept)) == 1


async def test_a_program_that_goes_on_without_room_keeps_nothing(tmp_path: Path) -> None:
    """Functions of slime and verl get an answer without tokens."""
    contexts: list[int] = []

    async def play(episode: Episode) -> None:
        gateway = episode.gateway
        url = gateway.base_url.replace("/v1", "/generate")
        headers = {"Authorization": f"Bearer {gateway.api_key}"}
        input_ids = [1] * 10
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(4):
                async with session.post(url, json={"input_ids": input_ids}) as answer:
                    reply = await answer.json()
                contexts.append(max(len(turn.added) for turn in turns()))
                input_ids = [*input_ids, *reply["output_ids"], *([1] * 200_000)]
        assert (reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]) == ([], "length")

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, Script(token_ids("hi")))
    assert sample.error == ""
    assert contexts == [10] * 4


def test_a_text_has_at_least_as_many_tokens_as_its_bytes_say() -> None:
    template = Template(chat.tokenizer(), context=1000)
    longest = len("<|im_start|>")
    fits = "x" * 1000 * longest
    assert len(fits) < LARGE_CHARACTERS
    assert len(template.encode(fits)) == len(fits), "a small text is encoded, whatever its length"
    with pytest.raises(TextTooLongError) as refused:
        template.encode("ü" * LARGE_CHARACTERS)
    assert refused.value.tokens == -(-2 * LARGE_CHARACTERS // longest)
    wide = Template(chat.tokenizer(), context=10 * LARGE_CHARACTERS)
    assert len(wide.encode("x" * LARGE_CHARACTERS)) == LARGE_CHARACTERS


def test_a_tokenizer_with_unknown_words_has_no_bound() -> None:
    """A token for unknown words may stand for a word of any length."""
    template = Template(chat.tokenizer(unk_token="<unk>"), context=10)
    assert len(template.encode("x" * LARGE_CHARACTERS)) == LARGE_CHARACTERS


def test_a_template_that_fails_as_programs_do_refuses_the_messages() -> None:
    template = Template(chat.tokenizer("{{ (messages | length) / 0 }}"))
    with pytest.raises(PromptError, match="refuses the prompt"):
        template.text([{"role": "user", "content": "hi"}], None, opened=True)
