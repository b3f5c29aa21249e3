"""Anthropic's /v1/messages: texts, images, tools and their results."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from sluice import input_checks
from sluice.samples.sample import Messages
from sluice_rollout.gateway.interfaces import exchange
from sluice_rollout.gateway.interfaces.errors import GatewayError, invalid
from sluice_rollout.gateway.interfaces.exchange import (
    Answer,
    AnswerToolCall,
    RawImages,
    TurnRequest,
)
from sluice_rollout.gateway.interfaces.parameters import Count, Parameters, StopList, Typed, checked
from sluice_rollout.gateway.interfaces.streaming import Event

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_FREE_CHOICES = {"auto": "auto", "none": "none"}
_THOUGHTS = ("thinking", "redacted_thinking")


class MessageParameters(Parameters):
    """Parameters of /v1/messages."""

    max_tokens: Count | None = None
    stop_sequences: StopList | None = None
    thinking: Typed | None = None
    tool_choice: Typed | None = None


def read(body: dict[str, Any], sampled: Mapping[str, str]) -> TurnRequest:
    """Read a request. Raises GatewayError.

    `sampled` holds the arguments of earlier tool calls as the model wrote them, by the call's id.
    Clients send arguments back parsed, and any other spelling would change the history.
    """
    parameters = checked(MessageParameters, body)
    conversation = body.get("messages")
    if not isinstance(conversation, list) or not conversation:
        raise invalid("messages: expected a list of at least one message", "messages")
    system = exchange.text_of(body.get("system"))
    history: Messages = [{"role": "system", "content": system}] if system else []
    images: RawImages = {}
    for i, message in enumerate(conversation):
        history += _messages(message, f"messages[{i}]", sampled, images)
    choice = parameters.tool_choice.type if parameters.tool_choice else "auto"
    return TurnRequest(
        messages=history,
        tools=_tools(body.get("tools")),
        max_tokens=parameters.max_tokens,
        stop=parameters.stop_sequences or [],
        settings=_settings(body, choice, parameters.thinking),
        calls=choice != "none",
        raw_images=images,
    )


def _settings(body: dict[str, Any], choice: str, thinking: Typed | None) -> dict[str, Any]:
    requested = exchange.settings(body | {"tool_choice": _FREE_CHOICES.get(choice, choice)})
    thinks = thinking is not None and thinking.type != "disabled"
    return requested | ({"thinking": thinking.type} if thinking and thinks else {})


def _messages(message: Any, name: str, sampled: Mapping[str, str], images: RawImages) -> Messages:
    """Convert a message. The result of a tool becomes a separate message."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise invalid("messages: expected objects with a role, user or assistant", "messages")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise invalid("messages: expected a content of text, or a list of blocks", "messages")
    if message["role"] == "user":
        return _user_messages(blocks, f"{name}.content", images)
    text = exchange.text_of([b for b in blocks if b.get("type") not in ("tool_use", *_THOUGHTS)])
    calls = [_call(block, sampled) for block in blocks if block.get("type") == "tool_use"]
    converted = {"role": "assistant", "content": text}
    return [converted | {"tool_calls": calls} if calls else converted]


def _user_messages(blocks: list[dict[str, Any]], name: str, images: RawImages) -> Messages:
    results: Messages = []
    others: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            others.append(exchange.with_reference(block, f"{name}[{i}]", images))
            continue
        content = exchange.content_of(block.get("content"), f"{name}[{i}].content", images)
        call_id = str(block.get("tool_use_id"))
        results.append({"role": "tool", "content": content, "tool_call_id": call_id})
    said = [{"role": "user", "content": exchange.parts_of(others)}] if others else []
    return [*results, *said]


def _call(block: dict[str, Any], sampled: Mapping[str, str]) -> dict[str, Any]:
    name, values = str(block.get("id")), block.get("input") or {}
    if not isinstance(values, dict):
        raise invalid("messages: expected an object for the input of a tool_use", "messages")
    arguments = sampled.get(name, "")
    if not arguments or _object(arguments) != values:
        arguments = json.dumps(values)
    return exchange.call_message(name, str(block.get("name")), arguments)


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if not value:
        return None
    if not isinstance(value, list) or not all(
        isinstance(tool, dict)
        and isinstance(tool.get("name"), str)
        and isinstance(tool.get("input_schema"), dict)
        for tool in value
    ):
        raise invalid(
            "tools: expected [{name, description, input_schema}, ...]; hosted tools are not "
            "supported",
            "tools",
        )
    return [{"type": "function", "function": _function(tool)} for tool in value]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    description = {"description": tool["description"]} if tool.get("description") else {}
    return {"name": tool["name"]} | description | {"parameters": tool["input_schema"]}


def write(answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
    """Make the body of an answer."""
    stopped = answer.finish == "stop" and answer.stop in (body.get("stop_sequences") or [])
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", ""),
        "content": list(_blocks(answer)),
        "stop_reason": "stop_sequence" if stopped else _STOP_REASONS[answer.finish],
        "stop_sequence": answer.stop if stopped else None,
        "usage": _usage(answer),
    }


class Events:
    """The events of an answer: the frame, the blocks, the reason for the end."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._blocks = 0  # that have begun
        self._in_text = False

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        empty = write(Answer("", [], "stop", prompt_tokens, 0), self._body)
        unknown: Event = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": empty | unknown}

    def text(self, text: str) -> Iterator[Event]:
        if not self._in_text:
            yield self._start({"type": "text", "text": ""})
            self._in_text = True
        yield self._delta({"type": "text_delta", "text": text})

    def end(self, answer: Answer) -> Iterator[Event]:
        whole = write(answer, self._body)
        if self._in_text:
            yield self._stop()
        for block in whole["content"][self._blocks :]:
            if block["type"] == "text":  # an answer without any text
                yield self._start(block)
            else:
                yield self._start(block | {"input": {}})
                arguments = json.dumps(block["input"])
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            yield self._stop()
        ends = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ends, "usage": _usage(answer)}
        yield {"type": "message_stop"}

    def fail(self, error: GatewayError) -> Iterator[Event]:
        yield error.body | {"type": "error"}

    def _start(self, block: dict[str, Any]) -> Event:
        self._blocks += 1
        at = self._blocks - 1
        return {"type": "content_block_start", "index": at, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": self._blocks - 1}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        # Anthropic counts cached tokens apart from the others.
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    if answer.text or not answer.calls:
        yield {"type": "text", "text": answer.text}
    yield from map(_tool_use, answer.calls)


def _tool_use(call: AnswerToolCall) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": _object(call.arguments),
    }


def _object(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call. Returns {} if they are not a JSON object."""
    try:
        value = input_checks.load_json(arguments, "arguments")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
