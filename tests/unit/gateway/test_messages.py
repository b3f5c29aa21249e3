"""Requests of Anthropic's client to /v1/messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from sluice.samples.sample import SampleStatus
from sluice.samples.turns import TURNS
from sluice_rollout.episode import Episode
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.gateway.interfaces import messages
from sluice_rollout.gateway.interfaces.errors import GatewayError
from tests.unit.gateway.gateway_tools import counter_value, open_registry, play_episode, token_ids
from tests.unit.rollout.scripted_engine import Script

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1,  "b": 2}}</tool_call>'
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CHAT_BODY: dict[str, Any] = {
    "model": "any",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "hi"}],
}


def openai_client(gateway: Gateway) -> AsyncAnthropic:
    return AsyncAnthropic(
        base_url=gateway.base_url.removesuffix("/v1"), api_key=gateway.api_key, max_retries=0
    )


async def test_a_conversation_with_a_tool_goes_on_from_the_sampled_tokens(tmp_path: Path) -> None:
    texts: list[str] = []

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+2"}]}]
            ask: Any = {"model": "any", "max_tokens": 200, "system": "Add.", "tools": [TOOL]}
            first = await ai.messages.create(messages=history, **ask)
            (use,) = first.content
            assert (first.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "add")
            assert use.input == {"a": 1, "b": 2}
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
            history += [
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result]},
            ]
            second = await ai.messages.create(messages=history, **ask)
            texts.append(second.content[0].text)
            assert (second.stop_reason, second.usage.output_tokens) == ("end_turn", 1)

    rerendered = counter_value("rerendered_tokens")
    async with open_registry(tmp_path) as registry:
        sample = await play_episode(
            registry, play, Script(token_ids(CALL), token_ids("3")), tokens=300
        )
    assert (sample.status, texts, sample.branches) == (SampleStatus.COMPLETED, ["3"], [])
    by = [turn["by"] for turn in sample.metadata[TURNS]]
    assert by == ["model", "environment", "model"]
    assert counter_value("rerendered_tokens") == rerendered


async def test_a_stream_is_the_answer_in_the_clients_own_events(tmp_path: Path) -> None:
    streamed: list[Any] = []

    async def play(episode: Episode) -> None:
        async with (
            openai_client(episode.gateway) as ai,
            ai.messages.stream(**CHAT_BODY, tools=[TOOL]) as stream,
        ):
            streamed.append("".join([text async for text in stream.text_stream]))
            streamed.append(await stream.get_final_message())

    async with open_registry(tmp_path) as registry:
        await play_episode(registry, play, Script(token_ids(f"so {CALL}")), tokens=300)
    text, message = streamed
    assert text.strip() == "so"
    assert message.content[1].input == {"a": 1, "b": 2}
    assert message.stop_reason == "tool_use"


async def test_only_the_episodes_key_opens_it(tmp_path: Path) -> None:
    async def play(episode: Episode) -> None:
        base_url = episode.gateway.base_url.removesuffix("/v1")
        async with AsyncAnthropic(base_url=base_url, api_key="sluice-0.0.0-x") as ai:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await ai.messages.create(**CHAT_BODY)
        assert refused.value.body["type"] == "error"
        async with openai_client(episode.gateway) as ai:
            await ai.messages.create(**CHAT_BODY)

    async with open_registry(tmp_path) as registry:
        assert (await play_episode(registry, play, Script(token_ids("hello")))).error == ""


async def test_a_history_that_does_not_fit_ends_the_episode_as_truncated(tmp_path: Path) -> None:
    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            answer = await ai.messages.create(**CHAT_BODY)
            said = {"role": "assistant", "content": answer.content}
            more = {"role": "user", "content": "and"}
            await ai.messages.create(
                **CHAT_BODY | {"messages": [*CHAT_BODY["messages"], said, more]}
            )

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, Script(token_ids("hello")), tokens=5)
    assert sample.status is SampleStatus.TRUNCATED


def test_arguments_come_back_as_the_model_wrote_them() -> None:
    written = '{"b":2,  "a":1}'
    use = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1, "b": 2}}
    for sampled, arguments in [
        ({"call_1": written}, written),
        ({"call_1": '{"a": 5}'}, '{"a": 1, "b": 2}'),  # the client has changed them
        ({}, '{"a": 1, "b": 2}'),
    ]:
        body = CHAT_BODY | {"messages": [{"role": "assistant", "content": [use]}]}
        (message,) = messages.read(body, sampled).messages
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_thoughts_are_left_out_and_thinking_settings_are_counted() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "yes"}]}
    body = CHAT_BODY | {
        "messages": [said],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "any"},
        "stop_sequences": ["#"],
        "top_k": 4,
    }
    request = messages.read(body, {})
    assert request.messages == [{"role": "assistant", "content": "yes"}]
    assert request.settings == {"thinking": "enabled", "tool_choice": "any", "top_k": 4}
    assert (request.stop, request.max_tokens, request.calls) == (["#"], 200, True)
    assert not messages.read(CHAT_BODY | {"tool_choice": {"type": "none"}}, {}).calls


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"messages": []}, "at least one message", id="no message"),
        pytest.param({"messages": [{"role": "tool", "content": "x"}]}, "a role", id="a role"),
        pytest.param({"messages": [{"role": "user", "content": 3}]}, "list of blocks", id="number"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"messages\[0\]\.content\[0\]\.image: expected a data URL",
            id="picture",
        ),
        pytest.param({"tools": [{"type": "web_search"}]}, "hosted tools", id="hosted tool"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="no tokens"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(GatewayError, match=reason):
        messages.read(json.loads(json.dumps(CHAT_BODY | change)), {})
