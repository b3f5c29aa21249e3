"""The calculator task as an agent: OpenAI's client, a tool, and a loop until the model answers.

The gateway matches the history that the agent sends again with the sampled tokens.

    sluice run calculator.yaml --set rollout.function=calculator_agent.py:play

It also runs against any endpoint:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python calculator_agent.py "Calculate 7 * ( 81 - 63 )."
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parent))
from calculator import SYSTEM, calculate  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from sluice_rollout.episode import Episode

MODEL, MOST_TURNS = "small", 8
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "One operation on two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


async def solve(client: AsyncOpenAI, messages: list[Any]) -> str:
    """Return the model's first answer that calls no tool."""
    history = list(messages)
    for _ in range(MOST_TURNS):
        answer = await client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL])
        message = answer.choices[0].message
        history.append(message)
        if not message.tool_calls:
            return message.content or ""
        history += [
            {"role": "tool", "tool_call_id": call.id, "content": said(call.function.arguments)}
            for call in message.tool_calls
            if call.type == "function"
        ]
    return ""


def said(arguments: str) -> str:
    """Return the calculator's result of a call, or the error."""
    try:
        return str(calculate(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


async def play(episode: Episode) -> None:
    """Connect the agent to a job through the address and key of its episode."""
    async with episode.gateway.openai() as client:
        episode.metadata["said"] = await solve(client, list(episode.prompt.prompt))


if __name__ == "__main__":
    question = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.argv[1]}]
    print(asyncio.run(solve(AsyncOpenAI(), question)))
