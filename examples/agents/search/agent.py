"""An agent that searches: it writes a query, reads the best passage, and answers.

A question names a thing and one of its properties. The agent puts the thing's name before every
query, so that what is read is about it; what to look for, the model says.

It knows nothing of sluice. `search` is whatever takes a query and gives passages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI

MODEL, MOST_SEARCHES = "small", 1


async def solve(
    client: AsyncOpenAI, question: str, search: Callable[[str], str], tool: dict[str, Any]
) -> tuple[str, str]:
    """The answer, and the passages of the last search.

    tool: OpenAI's definition of `search`. The answer is empty where the model still searches in its
    last turn.
    """
    thing = question.split()[0]
    tools: list[Any] = [tool]
    messages: list[Any] = [{"role": "user", "content": question}]
    passages = ""
    for _ in range(MOST_SEARCHES + 1):
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        message = answer.choices[0].message
        if not message.tool_calls or message.tool_calls[0].type != "function":
            return message.content or "", passages
        call = message.tool_calls[0]
        passages = search(f"{thing} {json.loads(call.function.arguments)['query']}")
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": passages}]
    return "", passages
