"""An agent as many have one: OpenAI's client, two tools, and a loop until the model answers.

It knows nothing of sluice, and runs against any endpoint as it is:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python agent.py "7 * 8 + 5 ="
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI

MODEL, MOST_TURNS = "small", 4
SHELF = dict(zip("0123456789", "7305918264", strict=True))
NOTHING = {"type": "object", "properties": {}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": NOTHING}}
    for name, text in (
        ("calculate", "The last digit of the calculation that is asked for."),
        ("lookup", "The digit that is written on the shelf that is asked for."),
    )
]


def calculate(question: str) -> str:
    """`7 * 8 + 5 =` -> 1, the last digit of 61."""
    try:
        a, _, b, _, c, _ = question.split()
        return str((int(a) * int(b) + int(c)) % 10)
    except ValueError:
        return "error"


def lookup(question: str) -> str:
    """`shelf 0 =` -> 7."""
    return SHELF.get(question.split()[1], "error")


async def solve(client: AsyncOpenAI, question: str) -> str:
    """The model's answer, once it calls no tool any more."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MOST_TURNS):
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            if call.type != "function":
                continue
            tool = {"calculate": calculate, "lookup": lookup}[call.function.name]
            text = tool(question)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return ""


if __name__ == "__main__":
    print(asyncio.run(solve(AsyncOpenAI(), sys.argv[1])))
