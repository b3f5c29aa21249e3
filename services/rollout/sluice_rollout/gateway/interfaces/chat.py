"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from sluice_rollout.gateway.interfaces import exchange
from sluice_rollout.gateway.interfaces.errors import GatewayError, invalid
from sluice_rollout.gateway.interfaces.exchange import Answer, RawImages, TurnRequest
from sluice_rollout.gateway.interfaces.parameters import Choice, Count, Parameters, Stops, checked
from sluice_rollout.gateway.interfaces.streaming import Event


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None  # count the tokens at the end


class ChatParameters(Parameters):
    """Parameters of /v1/chat/completions."""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stops = None
    stream_options: StreamOptions | None = None
    tool_choice: Choice = None


def read(body: dict[str, Any]) -> TurnRequest:
    """Read a request. Raises GatewayError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages: expected a list of at least one message", "messages")
    parameters = checked(ChatParameters, body)
    images: RawImages = {}
    return TurnRequest(
        messages=[
            exchange.canonical(message, f"messages[{i}]", images)
            for i, message in enumerate(messages)
        ],
        tools=tools(body.get("tools")),
        max_tokens=parameters.max_completion_tokens or parameters.max_tokens,
        stop=parameters.stop or [],
        settings=exchange.settings(body),
        calls=parameters.tool_choice != "none",
        raw_images=images,
    )


def tools(value: Any) -> list[dict[str, Any]] | None:
    """Read tools into the form that chat templates expect. Raises GatewayError."""
    if not value:
        return None
    if not isinstance(value, list) or not all(
        isinstance(tool, dict) and exchange.is_function(tool.get("function")) for tool in value
    ):
        raise invalid(
            'tools: expected [{"type": "function", "function": {"name": ..., "parameters": {...}}},'
            " ...]",
            "tools",
        )
    return [{"type": "function", "function": tool["function"]} for tool in value]


def write(answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
    """Make the body of an answer."""
    message = answer.message | {"refusal": None}
    if answer.calls and not answer.text:
        message["content"] = None
    choice = {
        "index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None,
    }  # fmt: skip
    return _frame("chat.completion", body) | {"choices": [choice], "usage": usage(answer)}


class Events:
    """The chunks of an answer: role, text, tool calls, finish reason, usage."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._frame = _frame("chat.completion.chunk", body)
        self._with_usage = bool((body.get("stream_options") or {}).get("include_usage"))

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        yield self._chunk({"role": "assistant", "content": ""})

    def text(self, text: str) -> Iterator[Event]:
        yield self._chunk({"content": text})

    def end(self, answer: Answer) -> Iterator[Event]:
        for position, call in enumerate(answer.message.get("tool_calls", [])):
            yield self._chunk({"tool_calls": [{"index": position, **call}]})
        yield self._chunk({}, answer.finish)
        if self._with_usage:
            yield self._frame | {"choices": [], "usage": usage(answer)}

    def fail(self, error: GatewayError) -> Iterator[Event]:
        yield error.body

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return self._frame | {"choices": [choice]}


def usage(answer: Answer) -> dict[str, Any]:
    """Count the tokens of context and answer."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _frame(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model", ""),
    }
