"""The form of a tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import aiohttp


class ToolUnavailableError(Exception):
    """A tool cannot answer, for no fault of the model's: the sample fails,
    and nothing of it is trained.

    A tool raises it where its service is down, say. Any other error of a tool is told to the model.
    """


class Tool(Protocol):
    """A tool that ships, or one of its form."""

    @property
    def name(self) -> str:
        """The name that the model calls it by."""

    @property
    def definition(self) -> dict[str, Any]:
        """OpenAI's definition of it, for the rows' column `tools`."""

    def session(self) -> Callable[..., Any]:
        """The tool for one episode: a function, sync or async, of its arguments by name."""


def is_tool(value: Callable[..., Any] | Tool) -> TypeGuard[Tool]:
    """True for what has sessions. Nothing else of it is looked at: a definition may be asked of a
    server.
    """
    return hasattr(value, "session")


def definition_of(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """OpenAI's definition of a tool whose parameters are texts, all of them required.

    parameters: descriptions, by name.
    """
    properties = {key: {"type": "string", "description": t} for key, t in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


async def body_of(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The first `most` bytes of an answer's body."""
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) >= most:
            break
    return bytes(data[:most])


def shortened(text: str, longest: int) -> str:
    """At most `longest` characters: the beginning and the end, with a word on what is left out."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
