"""A ready-made generate function for models with tools, and its parts.

    # tools.py, with `rollout.function: tools.py:play` and rows that describe the same tools in
    # their column `tools`
    def add(a: float, b: float) -> float:
        return a + b

    play = ToolLoop([add])

The model calls as Hermes and Qwen do, <tool_call>{"name": "add", "arguments": {"a": 1, "b":
2}}</tool_call>, or in plain JSON (`parse=json_calls`). What a tool returns goes back through the
model's own chat template, as text that is not trained on; what the model said stays the tokens that
it made.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sluice.data.chat import between_turns
from sluice.input_checks import without_surrogates
from sluice.runtime.gather import gather
from sluice.telemetry import tracing
from sluice_rollout import metrics
from sluice_rollout.episode import Episode
from sluice_rollout.tool_calls import ANSWER, CALLS, ToolCall, hermes_calls, json_calls
from sluice_rollout.toolbox.base import Tool, ToolUnavailableError, is_tool
from sluice_rollout.user_functions.threads import LateError, NoThreadError, Threads

__all__ = [
    "ANSWER",
    "CALLS",
    "Tool",
    "ToolCall",
    "ToolLoop",
    "ToolUnavailableError",
    "hermes_calls",
    "json_calls",
]


class ToolLoop:
    """Turns of the model and answers of tools, until a turn calls none: a `rollout.function`.

    tools: functions, sync or async, by their names, and those of `toolbox`. max_calls: of an
    episode; the turn that goes beyond is its last. seconds: of one call. longest: characters of an
    answer. template: further variables of the chat template. threads: for tools that are not async.
    """

    def __init__(
        self,
        tools: Iterable[Callable[..., Any] | Tool],
        *,
        max_turns: int = 8,
        max_calls: int = 64,
        parse: Callable[[str], list[ToolCall]] = hermes_calls,
        seconds: float = 30.0,
        longest: int = 8192,
        template: dict[str, Any] | None = None,
        threads: Threads | None = None,
    ) -> None:
        self._tools: dict[str, Any] = {_name(tool): tool for tool in tools}
        self._max_calls = max_calls
        self._max_turns, self._parse, self._template = max_turns, parse, template
        self._seconds, self._longest = seconds, longest
        self._threads = threads or Threads("tool")

    async def __call__(self, episode: Episode) -> None:
        tools = self._opened()
        episode.metadata[CALLS] = 0
        for turns_left in reversed(range(self._max_turns)):
            turn = await episode.generate()
            episode.metadata[ANSWER] = turn.text
            calls = self._parse(turn.text)
            if not calls or not turns_left:
                return
            episode.metadata[CALLS] += len(calls)
            if episode.metadata[CALLS] > self._max_calls:
                return
            answers = await gather(*(self._answer(call, tools) for call in calls))
            messages = [
                {"role": "tool", "name": call.name, "content": answer}
                for call, answer in zip(calls, answers, strict=True)
            ]
            last = turn.tokens[-1] if turn.tokens else -1
            episode.observe(between_turns(episode.tokenizer, messages, last, self._template))

    def _opened(self) -> dict[str, Callable[..., Any]]:
        """The functions that answer one episode's calls."""
        return {
            name: tool.session() if is_tool(tool) else tool for name, tool in self._tools.items()
        }

    async def _answer(self, call: ToolCall, tools: Mapping[str, Callable[..., Any]]) -> str:
        """The answer that the model gets: also to a mistake of its own,
        and of a tool that fails or hangs.

        Raises ToolUnavailableError where the call could not be made.
        """
        tool = tools.get(call.name)
        if call.error or tool is None:
            metrics.TOOL_CALLS.labels(tool="", outcome="misunderstood").inc()
            known = ", ".join(tools)
            return f"error: {call.error or f'there is no tool {call.name!r}; there is {known}'}"
        try:
            with (
                metrics.TOOL_SECONDS.labels(call.name).time(),
                tracing.span("tool", tool=call.name),
            ):
                value = await self._threads.call(
                    functools.partial(tool, **call.arguments), seconds=self._seconds
                )
                text = self._text(value)
        except (NoThreadError, ToolUnavailableError) as error:
            metrics.TOOL_CALLS.labels(tool=call.name, outcome="unavailable").inc()
            raise ToolUnavailableError(f"{call.name}: {error}") from error
        except Exception as error:  # the user's tool may raise anything
            late = isinstance(error, LateError)
            metrics.TOOL_CALLS.labels(tool=call.name, outcome="timeout" if late else "raised").inc()
            text = (
                f"no answer after {self._seconds:g} s"
                if late
                else f"{type(error).__name__}: {error}"
            )
            return self._text(f"error: {text}")
        metrics.TOOL_CALLS.labels(tool=call.name, outcome="ok").inc()
        return text

    def _text(self, value: Any) -> str:
        """An answer as the model reads it: a text is one already, anything else is JSON.

        Halves of surrogate pairs, which no tokenizer takes, become U+FFFD.
        """
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        return without_surrogates(text[: self._longest])


def _name(tool: Any) -> str:
    name: str = tool.name if is_tool(tool) else tool.__name__
    return name
