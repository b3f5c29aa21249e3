"""A ready-made generate function for models with tools.

    # tools.py, with `rollout.function: tools.py:play` and rows that describe the same tools in
    # their column `tools`
    def add(a: float, b: float) -> float:
        return a + b

    play = ToolLoop([add])

The model calls tools as Hermes and Qwen do, <tool_call>{"name": "add", "arguments": {"a": 1, "b":
2}}</tool_call>, or in plain JSON (`parse=json_calls`). The result of a tool is encoded by the
model's chat template, as text that is not trained on. The model's turns keep the tokens that it
made.

A tool may return an image, or a list of texts and images: the bytes of a file, a data URL, or a
part of a message with a data URL. A model without images (`data.images`) reads `(image)` instead.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sluice.data.chat import between_turns
from sluice.images.image import Image, image_part
from sluice.images.reading import ImageError
from sluice.input_checks import without_surrogates
from sluice.runtime.gather import gather
from sluice.telemetry import tracing
from sluice_rollout import metrics
from sluice_rollout.episode import Episode
from sluice_rollout.tool_calls import ANSWER, CALLS, ToolCall, hermes_calls, json_calls
from sluice_rollout.toolbox.base import Tool, ToolUnavailableError, is_tool
from sluice_rollout.toolbox.results import IMAGE_TEXT, is_image, parts_of
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
    """Alternates turns of the model and results of tools, until a turn calls no tool.

    A `rollout.function`.

    Parameters
    ----------
    tools
        Functions, sync or async, called by their names, and tools of `toolbox`.
    max_turns
        Most turns of an episode.
    max_calls
        Most calls of an episode. A turn that exceeds it is the last one.
    parse
        Reads the calls of a turn.
    seconds
        Time limit of a call.
    longest
        Most characters of a result.
    template
        Further variables of the chat template.
    threads
        Pool for tools that are not async.

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
            shown = [await self._shown(answer, episode) for answer in answers]
            messages = [
                {"role": "tool", "name": call.name, "content": _content(parts)}
                for call, parts in zip(calls, shown, strict=True)
            ]
            last = turn.tokens[-1] if turn.tokens else -1
            tokens = between_turns(episode.tokenizer, messages, last, self._template)
            images = [part for parts in shown for part in parts if isinstance(part, Image)]
            if images:
                await episode.observe_images(tokens, images)
            else:
                episode.observe(tokens)

    def _opened(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that answer one episode's calls."""
        return {
            name: tool.session() if is_tool(tool) else tool for name, tool in self._tools.items()
        }

    async def _answer(self, call: ToolCall, tools: Mapping[str, Callable[..., Any]]) -> Any:
        """Return the result that the model gets, also if it called wrongly or the tool failed.

        It is a text, or a list of texts and images that are not read yet. Raises
        ToolUnavailableError if the call could not be made.
        """
        tool = tools.get(call.name)
        if call.error or tool is None:
            metrics.TOOL_CALLS.labels(tool="", outcome="misunderstood").inc()
            names = ", ".join(tools)
            return f"error: {call.error or f'there is no tool {call.name!r}; there is {names}'}"
        try:
            with (
                metrics.TOOL_SECONDS.labels(call.name).time(),
                tracing.span("tool", tool=call.name),
            ):
                value = await self._threads.call(
                    functools.partial(tool, **call.arguments), seconds=self._seconds
                )
                parts = [part if is_image(part) else self._text(part) for part in parts_of(value)]
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
        return parts if any(map(is_image, parts)) else parts[0]

    async def _shown(self, answer: Any, episode: Episode) -> list[str | Image]:
        """Return a result with its images read."""
        parts = answer if isinstance(answer, list) else [answer]
        return [await self._image(part, episode) if is_image(part) else part for part in parts]

    async def _image(self, part: Any, episode: Episode) -> str | Image:
        """Return an image, or the text that the model reads in its place."""
        if episode.image_gate is None:
            return IMAGE_TEXT
        try:
            return await episode.read_image(part)
        except ImageError as error:
            return self._text(f"error: the tool's image cannot be shown: {error}")

    def _text(self, value: Any) -> str:
        """Return a result as the model reads it: text as it is, anything else as JSON.

        Halves of surrogate pairs, which tokenizers refuse, become U+FFFD.
        """
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        return without_surrogates(text[: self._longest])


def _content(parts: list[str | Image]) -> str | list[dict[str, Any]]:
    """Return a result as the content of a message."""
    if not any(isinstance(part, Image) for part in parts):
        return "\n".join(map(str, parts))
    return [
        image_part(part.digest) if isinstance(part, Image) else {"type": "text", "text": part}
        for part in parts
    ]


def _name(tool: Any) -> str:
    name: str = tool.name if is_tool(tool) else tool.__name__
    return name
