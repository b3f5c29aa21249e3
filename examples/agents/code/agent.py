"""An agent that writes Python: it runs a program, reads the error, and tries again.

It knows nothing of sluice. `run` is whatever runs a program and gives its output.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI

MODEL, MOST_PROGRAMS = "small", 2
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run a Python program; the answer is its output.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
        },
    }
]


async def solve(client: AsyncOpenAI, question: str, run: Callable[[str], str]) -> str:
    """The output of the first program that raises nothing; empty where there is none."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MOST_PROGRAMS):
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls or message.tool_calls[0].type != "function":
            return ""
        call = message.tool_calls[0]
        code = json.loads(call.function.arguments)["code"]
        output = await asyncio.to_thread(run, code)
        if "Error: " not in output:
            return output.strip()
        error = output.strip().splitlines()[-1]
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": error}]
    return ""
