"""Requests to models other than the policy: server, key, and that they are not trained."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from sluice.samples.sample import SampleStatus
from sluice_rollout.episode import Episode
from tests.unit.gateway.gateway_tools import (
    CHAT_BODY,
    open_registry,
    openai_client,
    play_episode,
    token_ids,
)
from tests.unit.rollout.scripted_engine import Script

ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "big",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "good"}}
    ],
}
CHUNK = (
    b'data: {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "big", '
    b'"choices": [{"index": 0, "delta": {"content": "good"}}]}\n\n'
)


@dataclass
class Judge:
    """A server of another model, which records (path, model, key) of its requests."""

    url: str = ""
    seen: list[tuple[str, Any, str | None]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.path, body["model"], request.headers.get("Authorization")))
        if not body.get("stream"):
            return web.json_response(ANSWER)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in (CHUNK, CHUNK, b"data: [DONE]\n\n"):
            await response.write(part)
        return response


@pytest.fixture
async def judge() -> AsyncIterator[Judge]:
    judge, app = Judge(), web.Application()
    app.router.add_post("/v1/{path:.*}", judge.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    judge.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield judge
    await runner.cleanup()


def judging(judge: Judge, **fields: Any) -> dict[str, Any]:
    return {"rollout__models": [{"name": "judge", "url": judge.url, "model": "big", **fields}]}


async def test_each_request_goes_to_the_model_that_it_names(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            for model in ("any", "judge"):
                answer = await ai.chat.completions.create(**(CHAT_BODY | {"model": model}))
                texts.append(answer.choices[0].message.content or "")
            texts.extend([model.id async for model in ai.models.list()])

    async with open_registry(
        tmp_path, **judging(judge, key={"name": "keys", "key": "judge"})
    ) as registry:
        sample = await play_episode(registry, play, Script(token_ids("one")))
    assert texts == ["one", "good", "model", "judge"]
    assert judge.seen == [("/v1/chat/completions", "big", "Bearer secret")]
    assert (sample.status, sample.trainable_tokens) == (
        SampleStatus.COMPLETED,
        len(token_ids("one")),
    )


async def test_a_stream_of_another_model_comes_as_it_is(judge: Judge, tmp_path: Path) -> None:
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            await ai.chat.completions.create(**CHAT_BODY)
            ask = CHAT_BODY | {"model": "judge", "stream": True}
            async for chunk in await ai.chat.completions.create(**ask):
                texts.append(chunk.choices[0].delta.content or "")

    async with open_registry(tmp_path, **judging(judge)) as registry:
        await play_episode(registry, play, Script(token_ids("one")))
    assert texts == ["good", "good"]
    assert [key for *_, key in judge.seen] == [None], "and none of its episode's"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        pytest.param({"url": "http://127.0.0.1:9/v1"}, "judge", id="nobody is there"),
        pytest.param({}, "judges", id="another name is the policy"),
    ],
)
async def test_an_unreachable_model_fails_the_request_and_unknown_names_are_the_policy(
    fields: dict[str, str], name: str, judge: Judge, tmp_path: Path
) -> None:
    said: list[str] = []

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway, max_retries=0) as ai:
            with contextlib.suppress(openai.APIStatusError):
                answer = await ai.chat.completions.create(**(CHAT_BODY | {"model": name}))
                said.append(answer.choices[0].message.content or "")

    async with open_registry(tmp_path, **judging(judge, **fields)) as registry:
        sample = await play_episode(registry, play, Script(token_ids("one")))
    assert said == (["one"] if name == "judges" else [])
    assert sample.status is (SampleStatus.COMPLETED if said else SampleStatus.FAILED)
    assert judge.seen == []
