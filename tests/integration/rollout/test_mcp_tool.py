"""Tools of real MCP servers, by command and by address."""

from __future__ import annotations

import base64
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_rollout.toolbox import Mcp
from sluice_rollout.toolbox.results import parts_of
from sluice_rollout.tools import ToolCall, ToolLoop, ToolUnavailableError
from tests.integration.rendezvous_server import DEADLINE
from tests.tools import missing

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]


@pytest.fixture(scope="module", params=["command", "address"])
def server(request: pytest.FixtureRequest) -> Iterator[Mcp]:
    if importlib.util.find_spec("mcp") is None:
        missing("needs mcp: pip install 'sluice-rl[mcp]'")
    paths = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    if request.param == "command":
        yield Mcp(COMMAND, environment=paths, seconds=60.0)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)])
    _until_it_listens(process, port)
    yield Mcp(f"http://127.0.0.1:{port}/mcp", seconds=60.0)
    process.kill()
    process.wait()


def _until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 3 * DEADLINE
    while process.poll() is None and time.monotonic() < end:
        with socket.socket() as connection:
            if not connection.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)
    raise AssertionError(f"the server does not listen; its exit code: {process.poll()}")


async def test_a_tool_answers(server: Mcp) -> None:
    assert await server.tool("add").session()(a=1, b=2) == "3"


async def test_an_image_of_a_tool_keeps_its_place(server: Mcp) -> None:
    answer = await server.tool("draw").session()()
    data = base64.b64encode(b"\x89PNG cat").decode()
    image = {"type": "image", "data": data, "mimeType": "image/png"}
    assert answer == ["a cat:", image]
    assert parts_of(answer) == ["a cat:", {"type": "image", "base64": data}]


async def test_what_a_tool_says_of_a_mistake_is_told_to_the_model(server: Mcp) -> None:
    assert "as asked" in await server.tool("fail").session()()
    assert (await server.tool("fail").session()()).startswith("error: ")
    assert (await server.tool("add").session()(a="x", b=2)).startswith("error: ")
    assert (await server.tool("none").session()()).startswith("error: ")


async def test_a_definition_is_the_servers(server: Mcp) -> None:
    tool = server.tool("add")
    function = tool.definition["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert set(function["parameters"]["properties"]) == {"a", "b"}
    with pytest.raises(ToolUnavailableError, match="the server has add, fail, draw, hang"):
        _ = server.tool("none").definition


async def test_a_tool_that_hangs(server: Mcp) -> None:
    """Check that the server's process ends with the call."""
    short = Mcp(server.server, environment=server.environment, seconds=5.0)
    answer = await short.tool("hang").session()()
    assert answer == "error: no answer after 5 s"


async def test_a_server_that_is_not_there_fails_the_sample() -> None:
    if importlib.util.find_spec("mcp") is None:
        missing("needs mcp: pip install 'sluice-rl[mcp]'")
    for server in ("http://127.0.0.1:1/mcp", ["/no/such/command"]):
        loop = ToolLoop([Mcp(server).tool("add")])
        with pytest.raises(ToolUnavailableError):
            await loop._answer(ToolCall("add", {"a": 1, "b": 2}), loop._opened())
