"""Converts between an environment of OpenEnv and a model's messages.

Observations become texts, answers become actions, and tools become definitions of OpenAI's. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sluice.samples.sample import Messages

LIST_TOOLS = {"type": "list_tools"}
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_IGNORED = ("metadata",)  # fields of every action that the model does not fill in


class ActionError(Exception):
    """An answer that is not an action. The message is for the model."""


def opening(prompt: str | Messages, observation: str) -> Messages:
    """Make the first messages: the row's, with an observation in the user's last message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        content = "\n\n".join(text for text in (last["content"], observation) if text)
        return [*messages[:-1], last | {"content": content}]
    return [*messages, {"role": "user", "content": observation}]


def shown(observation: dict[str, Any], field: str | None = None) -> str:
    """Write an observation as text: one field, its only text, or the whole as JSON."""
    if field is not None:
        value = observation.get(field, "")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    filled = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    if len(filled) == 1 and isinstance(text := next(iter(filled.values())), str):
        return text
    return json.dumps(filled, ensure_ascii=False)


def has_tools(schema: dict[str, Any]) -> bool:
    """True if the environment's actions are calls of tools, by the schema of an action."""
    return {"tool_name", "arguments"} <= set(schema.get("properties", {}))


def action_of(answer: str, schema: dict[str, Any], field: str | None = None) -> dict[str, Any]:
    """Read the action in an answer, ignoring the thoughts before it.

    The whole text becomes `field`, or the only required field if that is a text. Otherwise the
    answer must contain a JSON object. Raises ActionError.
    """
    text = answer.rpartition("</think>")[2].strip()
    properties = {k: v for k, v in schema.get("properties", {}).items() if k not in _IGNORED}
    needed = [name for name in schema.get("required", []) if name in properties] or list(properties)
    if field is None and len(needed) == 1 and properties[needed[0]].get("type") == "string":
        field = needed[0]
    if field is not None:
        return {field: text}
    for part in (*reversed(_FENCED.findall(text)), text):
        try:
            action = json.loads(part)
        except ValueError:
            continue
        if isinstance(action, dict):
            return action
    raise ActionError(f"expected a JSON object with {', '.join(properties) or 'no fields'}")


def definitions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert an environment's tools to OpenAI's form."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def call_of(call: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool call of the model to an action. Raises ActionError."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        raise ActionError(f"the arguments are not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ActionError("the arguments are not a JSON object")
    return {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}


def result_of(observation: dict[str, Any]) -> str:
    """Write the result of a tool call as text."""
    if error := observation.get("error"):
        return f"error: {error.get('message', error) if isinstance(error, dict) else error}"
    result = observation.get("result", observation)
    if isinstance(result, dict) and "data" in result:  # FastMCP's full answer
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
