"""The protocol of a tool, and helpers of several tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import aiohttp


class ToolUnavailableError(Exception):
    """A tool cannot answer, which is not the model's fault: the sample fails and is not trained.

    For example, the tool's service is down. The model sees any other error of a tool.
    """


class Tool(Protocol):
    """A ready-made tool, or one of the same form."""

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""

    @property
    def definition(self) -> dict[str, Any]:
        """OpenAI's definition of the tool, for the rows' column `tools`."""

    def session(self) -> Callable[..., Any]:
        """Return the tool for one episode: a function, sync or async, of its arguments by name."""


def is_tool(value: Callable[..., Any] | Tool) -> TypeGuard[Tool]:
    """Return True for an object with sessions.

    Other attributes are not read: a definition may need a request to a server.
    """
    return hasattr(value, "session")


def definition_of(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Return OpenAI's definition of a tool whose parameters are texts, all required.

    `parameters` are their descriptions, by name.
    """
    properties = {key: {"type": "string", "description": t} for key, t in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


async def body_of(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the first `most` bytes of an answer's body."""
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) >= most:
            break
    return bytes(data[:most])


def shortened(text: str, longest: int) -> str:
    """Return at most `longest` characters: the beginning and the end, with a note between."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
