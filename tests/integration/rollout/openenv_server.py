"""Environments of OpenEnv, served by its own package, in an interpreter that has it.

python openenv_server.py TEXT_PORT TOOLS_PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Environment, MCPEnvironment
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

STEPS = 3
# Sessions that may be open at once; one more is refused.
SESSIONS = 2


class Word(Action):
    """An action: a word of the model."""

    message: str


class Observed(Observation):
    """An observation: words for the model."""

    word: str = ""


class Talk(Environment):
    """Ends with the third word. Counts the letters of each."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def reset(self, seed: int | None = None, **_: Any) -> Observed:
        self.steps = 0
        return Observed(word="w0002" if seed == 7 else f"seed {seed}")

    def step(self, action: Word, **_: Any) -> Observed:
        if not action.message:
            raise ValueError("say something")
        self.steps += 1
        return Observed(word="w0005", reward=0.25 * self.steps, done=self.steps == STEPS)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


def add(n: int) -> str:
    """Add something to a number."""
    return "w0002"


def lookup(n: int) -> str:
    """Look a number up."""
    return "w0005"


class Tools(MCPEnvironment):
    """Two tools; ends with the third call."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")
        server.tool(add)
        server.tool(lookup)
        super().__init__(server)
        self.calls = 0

    def reset(self, **_: Any) -> Observation:
        self.calls = 0
        return Observation()

    async def step_async(self, action: Action, *arguments: Any, **more: Any) -> Observation:
        observation = await super().step_async(action, *arguments, **more)
        if isinstance(action, CallToolAction):
            self.calls += 1
            observation.reward, observation.done = 0.5, self.calls >= STEPS
        return observation

    def _step_impl(self, action: Action, *_: Any, **__: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State(step_count=self.calls)


async def main(text_port: int, tools_port: int) -> None:
    """Serve both until the end."""
    apps = [
        (create_fastapi_app(Talk, Word, Observed, max_concurrent_envs=SESSIONS), text_port),
        (create_fastapi_app(Tools, CallToolAction, CallToolObservation, SESSIONS), tools_port),
    ]
    configs = [uvicorn.Config(app, port=port, log_level="warning") for app, port in apps]
    await asyncio.gather(*(uvicorn.Server(config).serve() for config in configs))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
