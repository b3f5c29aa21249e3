"""An MCP server with four tools: `python mcp_server.py [PORT]`, by its standard input without."""

from __future__ import annotations

import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError

# The bytes of a file: the server sends them without a look.
CAT = b"\x89PNG cat"

server = MCPServer("numbers")


@server.tool()  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()  # type: ignore[untyped-decorator]
def fail() -> str:
    """Fail."""
    raise ToolError("as asked")


@server.tool()  # type: ignore[untyped-decorator]
def draw() -> list[str | Image]:
    """Draw a cat."""
    return ["a cat:", Image(data=CAT, format="png")]


@server.tool()  # type: ignore[untyped-decorator]
def hang() -> str:
    """Hang."""
    time.sleep(3600)
    return ""


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
