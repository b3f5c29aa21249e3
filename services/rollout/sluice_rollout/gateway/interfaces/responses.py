"""OpenAI's /v1/responses, as far as the clients `openai` and `openai-agents` use it.

It supports messages with texts and images, function calls and their outputs. Answers are whole or
streams of events.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from sluice.samples.sample import Messages
from sluice_rollout.gateway.interfaces import exchange
from sluice_rollout.gateway.interfaces.errors import GatewayError, invalid
from sluice_rollout.gateway.interfaces.exchange import (
    Answer,
    AnswerToolCall,
    RawImages,
    TurnRequest,
)
from sluice_rollout.gateway.interfaces.parameters import Choice, Count, Parameters, checked
from sluice_rollout.gateway.interfaces.streaming import Event


class ResponseParameters(Parameters):
    """Parameters of /v1/responses."""

    max_output_tokens: Count | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None
    tool_choice: Choice = None


def read(body: dict[str, Any], histories: Mapping[str, Messages]) -> TurnRequest:
    """Read a request. Raises GatewayError.

    `histories` holds earlier histories, by the id of the response that ends them.
    """
    if body.get("background") or body.get("conversation"):
        raise invalid(
            "background, conversation: not supported; send the input or previous_response_id"
        )
    parameters = checked(ResponseParameters, body)
    previous = parameters.previous_response_id
    if previous is not None and previous not in histories:
        raise invalid("this episode has no response with this id", "previous_response_id")
    earlier = histories[previous] if previous is not None else []
    images: RawImages = {}
    history = earlier + messages(body.get("input"), images)
    if parameters.instructions:
        start = history[1:] if history[0]["role"] == "system" and earlier else history
        history = [{"role": "system", "content": parameters.instructions}, *start]
    return TurnRequest(
        messages=history,
        tools=_tools(body.get("tools")),
        max_tokens=parameters.max_output_tokens,
        settings=exchange.settings(body),
        calls=parameters.tool_choice != "none",
        raw_images=images,
    )


def messages(value: Any, images: RawImages) -> Messages:
    """Convert the items of an input to messages. Raises GatewayError.

    `images` gets the images in them.
    """
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise invalid("input: expected a text, or a list of at least one item", "input")
    history: Messages = []
    for i, item in enumerate(value):
        _add(history, item if isinstance(item, dict) else {}, f"input[{i}]", images)
    if not history:
        raise invalid("input: expected at least one message", "input")
    return history


def _add(history: Messages, item: dict[str, Any], name: str, images: RawImages) -> None:
    """Append an item to a history. Text and calls of one answer become one message."""
    kind = item.get("type", "message")
    last = history[-1] if history and history[-1]["role"] == "assistant" else None
    if kind == "function_call":
        call = exchange.call_message(
            str(item.get("call_id")), str(item.get("name")), str(item.get("arguments"))
        )
        if last is None:
            history.append(last := {"role": "assistant", "content": ""})
        last["tool_calls"] = [*last.get("tool_calls", []), call]
    elif kind == "function_call_output":
        output = exchange.content_of(item.get("output"), f"{name}.output", images)
        call_id = str(item.get("call_id"))
        history.append({"role": "tool", "content": output, "tool_call_id": call_id})
    elif kind == "message":
        history.append(exchange.canonical(item, name, images))
    elif kind != "reasoning":
        raise invalid(f"input: an item of type {kind!r} is not supported", "input")


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if not value:
        return None
    if not isinstance(value, list) or not all(
        isinstance(tool, dict) and tool.get("type") == "function" and exchange.is_function(tool)
        for tool in value
    ):
        raise invalid(
            "tools: only functions, {type, name, parameters}; hosted tools are not supported",
            "tools",
        )
    names = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}
        for tool in value
    ]


def write(answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
    """Make the body of an answer."""
    return _finished(_frame(body), answer, list(_items(answer)))


def _finished(frame: dict[str, Any], answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
    cut = answer.finish == "length"
    details = {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0}
    return frame | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


class Events:
    """The events of an answer, numbered. `id` is that of the response."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._frame = _frame(body)
        self.id: str = self._frame["id"]
        self._begun = self._frame | {"status": "in_progress", "output": [], "usage": None}
        self._numbers = count()
        self._message_id = ""  # of the item with the text, once it has begun

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        yield self._event("created", response=self._begun)

    def text(self, text: str) -> Iterator[Event]:
        if not self._message_id:
            yield from self._begin_text()
        yield self._event("output_text.delta", **self._at, delta=text, logprobs=[])

    def end(self, answer: Answer) -> Iterator[Event]:
        items = list(_items(answer, self._message_id))
        for index, item in enumerate(items):
            if item["type"] == "message":
                yield from self._end_text(item)
            else:
                yield from self._call(index, item)
            yield self._event("output_item.done", output_index=index, item=item)
        whole = _finished(self._frame, answer, items)
        yield self._event(whole["status"], response=whole)

    def fail(self, error: GatewayError) -> Iterator[Event]:
        failure = {"code": "server_error", "message": error.message}
        response = self._begun | {"status": "failed", "error": failure}
        yield self._event("failed", response=response)

    @property
    def _at(self) -> dict[str, Any]:
        return {"output_index": 0, "item_id": self._message_id, "content_index": 0}

    def _begin_text(self) -> Iterator[Event]:
        message = _message("")
        self._message_id = message["id"]
        begun = message | {"content": [], "status": "in_progress"}
        yield self._event("output_item.added", output_index=0, item=begun)
        yield self._event("content_part.added", **self._at, part=message["content"][0])

    def _end_text(self, item: dict[str, Any]) -> Iterator[Event]:
        (part,) = item["content"]
        if not self._message_id:  # an answer without any text
            yield from self._begin_text()
            item["id"] = self._message_id
        yield self._event("output_text.done", **self._at, text=part["text"], logprobs=[])
        yield self._event("content_part.done", **self._at, part=part)

    def _call(self, index: int, item: dict[str, Any]) -> Iterator[Event]:
        at = {"output_index": index, "item_id": item["id"]}
        name, arguments = item["name"], item["arguments"]
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("output_item.added", output_index=index, item=begun)
        yield self._event("function_call_arguments.delta", **at, delta=arguments)
        yield self._event("function_call_arguments.done", **at, name=name, arguments=arguments)

    def _event(self, kind: str, /, **fields: Any) -> Event:
        return {"type": f"response.{kind}", **fields, "sequence_number": next(self._numbers)}


def _items(answer: Answer, message_id: str = "") -> Iterator[dict[str, Any]]:
    if answer.text or not answer.calls:
        yield _message(answer.text, message_id)
    yield from map(_call, answer.calls)


def _message(text: str, message_id: str = "") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": message_id or f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _call(call: AnswerToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _frame(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model", ""),
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
    }
