"""The spans of an episode at the gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sluice_rollout.episode import Episode
from tests.unit.gateway.gateway_tools import CHAT_BODY, open_registry, openai_client, play_episode
from tests.unit.gateway.gateway_tools import token_ids as ids
from tests.unit.rollout.scripted_engine import Script

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


async def test_an_episode_has_its_turns_and_the_tools_between(
    exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            messages: list[Any] = list(CHAT_BODY["messages"])
            answer = await ai.chat.completions.create(model="x", messages=messages, tools=[TOOL])
            call = answer.choices[0].message.tool_calls[0]  # type: ignore[index]
            messages += [
                answer.choices[0].message,
                {"role": "tool", "tool_call_id": call.id, "content": "3"},
            ]
            await ai.chat.completions.create(model="x", messages=messages, tools=[TOOL])

    async with open_registry(tmp_path) as registry:
        sample = await play_episode(registry, play, Script(ids(CALL), ids("3")), tokens=300)
    assert sample.error == ""
    (episode,) = named(exporter, "episode")
    first, second = named(exporter, "turn")
    (tools,) = named(exporter, "tools")
    assert episode.attributes is not None
    assert episode.attributes["sluice.samples"] == (0,)
    assert episode.attributes["sluice.status"] == ("completed",)
    assert {parent_of(span) for span in (first, second)} == {episode.context.span_id}
    assert parent_of(tools) == second.context.span_id
    assert [parent_of(span) for span in named(exporter, "generate")] == [
        first.context.span_id,
        second.context.span_id,
    ]
    assert first.attributes is not None
    assert (first.attributes["sluice.turn"], first.attributes["sluice.finish"]) == (0, "tool_calls")
    assert first.attributes["sluice.tokens"] == len(CALL)
    assert tools.attributes == {"sluice.tools": ("add",)}
    assert first.start_time is not None
    assert tools.start_time is not None
    assert tools.end_time is not None
    assert first.start_time < tools.start_time <= tools.end_time


async def test_concurrent_turns_are_not_nested(
    exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    both = asyncio.Event()

    class Together(Script):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            answer = await super().generate(*arguments, **options)
            if not self.answers:
                both.set()
            await both.wait()
            return answer

    async def play(episode: Episode) -> None:
        async with openai_client(episode.gateway) as ai:
            await asyncio.gather(*(ai.chat.completions.create(**CHAT_BODY) for _ in range(2)))

    async with open_registry(tmp_path) as registry:
        await play_episode(registry, play, Together(ids("one"), ids("two")))
    (episode,) = named(exporter, "episode")
    turns = named(exporter, "turn")
    assert [parent_of(span) for span in turns] == [episode.context.span_id] * 2
    assert {parent_of(span) for span in named(exporter, "generate")} == {
        span.context.span_id for span in turns
    }
