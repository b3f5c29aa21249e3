"""The calculator's game as an agent plays it: OpenAI's client, a tool, and a loop until the model
answers. What it sends again of its history is matched with what was sampled.

    sluice run calculator.yaml --set rollout.function=calculator_agent.py:play

It also runs against any endpoint as it is:

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
    """The model's answer, once it calls the calculator no more."""
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
    """The calculator's word about a call, or what is wrong with that."""
    try:
        return str(calculate(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


async def play(episode: Episode) -> None:
    """Joins the agent to a job: its episode's address and key go in."""
    async with episode.gateway.openai() as client:
        episode.metadata["said"] = await solve(client, list(episode.prompt.prompt))


if __name__ == "__main__":
    question = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.argv[1]}]
    print(asyncio.run(solve(AsyncOpenAI(), question)))
