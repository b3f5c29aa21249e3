"""Tool calls in a model's text, as Hermes and Qwen write them or as plain JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from sluice.input_checks import InputError, load_json

# Keys of a sample's metadata, for rewards: how many tools the model has called, and the text of its
# last turn. If the job has seats, `seats` holds both for each seat, by its name.
CALLS, ANSWER = "tool_calls", "answer"
SEATS = "seats"
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model asked for."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""  # why it cannot be read, in words for the model; empty if it can


def hermes_calls(text: str) -> list[ToolCall]:
    """Read every `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` of a text."""
    return [_call(text) for text in _HERMES.findall(text)]


def json_calls(text: str) -> list[ToolCall]:
    """Read a turn that is a JSON object with a `name`, or a list of them.

    The JSON may be the whole turn or a fenced block in it. Any other turn has no calls.
    """
    fenced = _FENCED.findall(text)
    for part in fenced or [text]:
        try:
            value = load_json(part, "the tool call")
        except InputError:
            continue
        calls = value if isinstance(value, list) else [value]
        if calls and all(isinstance(call, dict) and "name" in call for call in calls):
            return [_call(json.dumps(call)) for call in calls]
    return []


def _call(text: str) -> ToolCall:
    try:
        value = load_json(text, "the tool call")
    except InputError as error:
        return ToolCall("", error=str(error))
    arguments = (
        value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
    )
    if isinstance(arguments, str):  # OpenAI sends arguments as JSON text
        try:
            arguments = load_json(arguments, "the arguments")
        except InputError as error:
            return ToolCall(str(value.get("name")), error=str(error))
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("name"), str)
        or not isinstance(arguments, dict)
    ):
        return ToolCall("", error='a tool call is an object {"name": text, "arguments": object}')
    return ToolCall(value["name"], arguments)
