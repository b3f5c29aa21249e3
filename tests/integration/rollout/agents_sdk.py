"""An unmodified program of openai-agents, run as a process: three turns with two tools.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python agents_sdk.py chat|responses [stream]
"""

from __future__ import annotations

import asyncio
import sys

import agents
from agents import Agent, MaxTurnsExceeded, ModelSettings, Runner, function_tool


@function_tool  # type: ignore[untyped-decorator]
def add(n: int) -> str:
    """Add."""
    return f"w{n % 2000:04d}"


@function_tool  # type: ignore[untyped-decorator]
def lookup(n: int) -> str:
    """Look up."""
    return f"w{(n + 1) % 2000:04d}"


async def main(api: str, *options: str) -> None:
    agents.set_tracing_disabled(True)
    agents.set_default_openai_api("chat_completions" if api == "chat" else "responses")
    agent = Agent(
        name="one",
        model="any",
        instructions="w0008",
        tools=[add, lookup],
        model_settings=ModelSettings(max_tokens=12),
    )
    try:
        if "stream" in options:
            run = Runner.run_streamed(agent, "w0002 w0005", max_turns=3)
            async for _ in run.stream_events():
                pass
        else:
            await Runner.run(agent, "w0002 w0005", max_turns=3)
    except MaxTurnsExceeded:
        print("three turns")


asyncio.run(main(*sys.argv[1:]))
