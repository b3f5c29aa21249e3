"""Tools of MCP servers (Model Context Protocol), by address or by command. Needs the extra `mcp`.

Each call uses a new connection, so no state is left when an episode ends, and a call that hangs
costs only itself. A server that keeps state between calls has to tell by the arguments whose state
it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sluice.runtime.extras import install_command
from sluice_rollout.toolbox.base import ToolUnavailableError, shortened

_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Mcp:
    """A server: `http://.../mcp`, or the words of a command, which is started for each call."""

    server: str | Sequence[str]
    # Variables of the command, in addition to PATH and the like.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Time limit of a call, with its connection.
    seconds: float = 20.0
    # Most characters of an answer.
    longest: int = 8192

    def tool(self, name: str) -> McpTool:
        """Return the tool of this name."""
        return McpTool(self, name)

    async def definitions(self) -> list[dict[str, Any]]:
        """Return OpenAI's definitions of all tools. Raises ToolUnavailableError."""
        try:
            async with asyncio.timeout(self.seconds), self._client() as client:
                tools = (await client.list_tools()).tools
        except Exception as error:  # the transport raises groups of any errors
            raise ToolUnavailableError(f"{self._shown}: {_innermost(error)}") from error
        return [_definition(tool) for tool in tools]

    async def call(self, name: str, arguments: dict[str, Any]) -> str | list[str | dict[str, Any]]:
        """Return a tool's answer, or its error: a text, or texts and images in their order.

        An image is MCP's `{type: image, data, mimeType}`; other kinds, such as sound, are named.

        Raises ToolUnavailableError if the server cannot be reached.
        """
        from mcp import MCPError

        limit = asyncio.timeout(self.seconds)
        try:
            async with limit, self._client() as client:
                answer = await client.call_tool(name, arguments)
        except Exception as error:  # the transport raises groups of any errors
            reason = _innermost(error)
            if limit.expired():
                return f"error: no answer after {self.seconds:g} s"
            if isinstance(reason, MCPError):
                return shortened(f"error: {reason}", self.longest)
            raise ToolUnavailableError(f"{self._shown}: {reason!r}") from error
        prefix = "error: " if answer.is_error else ""
        if not any(part.type == "image" for part in answer.content):
            texts = [getattr(part, "text", f"({part.type})") for part in answer.content]
            return shortened(prefix + "\n".join(texts), self.longest)
        parts = [_part(part, self.longest) for part in answer.content]
        return [prefix, *parts] if prefix else parts

    @property
    def _shown(self) -> str:
        return self.server if isinstance(self.server, str) else " ".join(self.server)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        try:
            from mcp import Client, StdioServerParameters
        except ImportError as error:
            raise ToolUnavailableError(
                f"the package mcp is not installed ({install_command('mcp')}): {error}"
            ) from error
        if isinstance(self.server, str):
            server: Any = self.server
        else:
            command, *words = self.server
            server = StdioServerParameters(
                command=command, args=words, env=dict(self.environment) or None
            )
        async with Client(server, read_timeout_seconds=self.seconds) as client:
            yield client


@dataclass
class McpTool:
    """A tool of an MCP server."""

    server: Mcp
    name: str

    @cached_property
    def definition(self) -> dict[str, Any]:
        """The server's definition, requested once. Raises ToolUnavailableError."""
        with ThreadPoolExecutor(1) as pool:  # this thread may run an event loop
            request = pool.submit(lambda: asyncio.run(self.server.definitions()))
            definitions = request.result(self.server.seconds + _GRACE_SECONDS)
        for definition in definitions:
            if definition["function"]["name"] == self.name:
                return definition
        names = ", ".join(definition["function"]["name"] for definition in definitions)
        raise ToolUnavailableError(f"{self.name}: the server has {names or 'no tools'}")

    def session(self) -> Callable[..., Any]:
        """Return the function of the tool. It keeps no state."""

        async def call(**arguments: Any) -> str | list[str | dict[str, Any]]:
            return await self.server.call(self.name, arguments)

        return call


def _part(part: Any, longest: int) -> str | dict[str, Any]:
    if part.type == "image":
        return {"type": "image", "data": part.data, "mimeType": part.mime_type}
    return shortened(getattr(part, "text", f"({part.type})"), longest)


def _definition(tool: Any) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _innermost(error: BaseException) -> BaseException:
    """Return the first error of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
