"""Between an environment of OpenEnv and a model: observations as text, answers as actions, tools as
definitions of OpenAI's. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sluice.samples.sample import Messages

LIST_TOOLS = {"type": "list_tools"}
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_OURS = ("metadata",)
"""Fields of every action that no model fills in."""


class ActionError(Exception):
    """An answer that is no action. The message is for the model."""


def opening(prompt: str | Messages, observation: str) -> Messages:
    """The first messages: the row's, with an observation behind the user's last words."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        told = "\n\n".join(text for text in (last["content"], observation) if text)
        return [*messages[:-1], last | {"content": told}]
    return [*messages, {"role": "user", "content": observation}]


def shown(observation: dict[str, Any], field: str | None = None) -> str:
    """An observation as the model reads it: one field of it; else its only text, or all as JSON."""
    if field is not None:
        value = observation.get(field, "")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    told = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    if len(told) == 1 and isinstance(text := next(iter(told.values())), str):
        return text
    return json.dumps(told, ensure_ascii=False)


def has_tools(schema: dict[str, Any]) -> bool:
    """True where the environment's actions are calls of tools. schema: of an action."""
    return {"tool_name", "arguments"} <= set(schema.get("properties", {}))


def action_of(answer: str, schema: dict[str, Any], field: str | None = None) -> dict[str, Any]:
    """The action in an answer, without the thoughts before it: the whole text as `field`, or as the
    only field that an action needs where that is a text; else the answer's JSON object.

    Raises ActionError.
    """
    text = answer.rpartition("</think>")[2].strip()
    properties = {k: v for k, v in schema.get("properties", {}).items() if k not in _OURS}
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
    """Tools of an environment, in OpenAI's form."""
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
    """The action that a tool call of the model is. Raises ActionError."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        raise ActionError(f"the arguments are not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ActionError("the arguments are no JSON object")
    return {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}


def result_of(observation: dict[str, Any]) -> str:
    """The result of a tool call, as the model reads it."""
    if error := observation.get("error"):
        return f"error: {error.get('message', error) if isinstance(error, dict) else error}"
    result = observation.get("result", observation)
    if isinstance(result, dict) and "data" in result:  # FastMCP's whole answer
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
