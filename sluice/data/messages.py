"""Normal form of chat messages for rows, clients of the gateway, and users' code.

Chat templates are strict about the form of a message, each in a different way: one prints the word
None for a null, one asks whether a key exists, one encodes `arguments` as JSON again, one iterates
over them. `normalised` gives all templates the same form, so that a recorded conversation looks to
the template as it did when it was generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sluice.images.image import IMAGE_PART, SCHEME, is_image_part
from sluice.input_checks import InputError, load_json, without_surrogates

# Types of parts that hold text: those of OpenAI's interfaces, and of rows.
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class MessageError(ValueError):
    """A message cannot be given to a template. The error text names the field."""


class Arguments(dict[str, Any]):
    """Arguments of a tool call that print as JSON.

    Some templates iterate over arguments or write them with `tojson`; DeepSeek's adds them to a
    text. An object that does all of that fits every template.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def normalised(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat message in the form that templates are given.

    Null fields count as absent. `content` becomes a text: parts are joined, and it may be empty
    with tool calls. Content with stored images (`image_part`) becomes a list of parts. `arguments`
    of a tool call become an object, also if given as OpenAI's JSON text, and print as JSON
    (`Arguments`); text that is not JSON, as a model may write it, stays text. `developer` becomes
    `system`.

    Raises
    ------
    MessageError
        If the content is neither text nor stored images, or a tool call has no function.

    """
    kept = present(message)
    kept["role"] = "system" if kept.get("role") == "developer" else kept.get("role")
    kept["content"] = content_of(kept.get("content"))
    if calls := kept.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise MessageError(f"tool_calls: expected a list, found {shown(calls)}")
        kept["tool_calls"] = [_call(call, f"tool_calls[{i}]") for i, call in enumerate(calls)]
    return kept


def present(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null fields."""
    return {key: value for key, value in message.items() if value is not None}


def content_of(content: Any) -> str | list[dict[str, Any]]:
    """Return the text of a content, or its parts if some are stored images.

    Raises MessageError.
    """
    if not isinstance(content, list) or not any(map(_is_stored, content)):
        return text_of(content)
    return [
        {"type": IMAGE_PART, IMAGE_PART: part[IMAGE_PART]}
        if _is_stored(part)
        else {"type": "text", "text": text_of([part])}
        for part in content
    ]


def _is_stored(part: Any) -> bool:
    return is_image_part(part) and str(part.get(IMAGE_PART)).startswith(SCHEME)


def text_of(content: Any) -> str:
    """Return the text of a content: a text, null, or a list of text parts. Raises MessageError."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and str(part.get("type", "text")) in TEXT_PARTS for part in content
    ):
        return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    raise MessageError(
        "content: expected a text, or parts of text; images of rows are read if data.images is "
        f"set; found {shown(content)}"
    )


def arguments_text(function: Mapping[str, Any]) -> str:
    """Return the arguments of a tool call as JSON text, unchanged if they are already text."""
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call as `{type: function, function: {name, arguments: object}}`."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(
            f"{where}: expected {{function: {{name, arguments}}}}, found {shown(call)}"
        )
    arguments = _object(function.get("arguments"))
    if function is call:  # {name, arguments}, the form of older data sets
        function = {"name": call["name"]}
        call = {key: value for key, value in call.items() if key not in ("name", "arguments")}
    function = {**present(function), "arguments": arguments}
    return {"type": "function", **present(call), "function": function}


def _object(arguments: Any) -> Any:
    if isinstance(arguments, str) and arguments:
        try:
            arguments = load_json(arguments, "arguments")
        except InputError:
            return arguments
    return Arguments(arguments or {}) if isinstance(arguments or {}, dict) else arguments


def shown(value: Any, width: int = 60) -> str:
    """Return a value as JSON, cut to a width."""
    try:
        text = without_surrogates(json.dumps(value, ensure_ascii=False, default=str))
    except (ValueError, RecursionError):  # more digits or levels than Python can write
        text = type(value).__name__
    return text if len(text) <= width else f"{text[:width]}..."
