"""An environment of verifiers, as its users write one: a taskset, its agent's program, its rewards.

Tests play it in an interpreter that has verifiers, and nothing of sluice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

AGENT = """
import json, sys
from openai import OpenAI

address, key, model, text = sys.argv[1:]
task = json.loads(text)
client = OpenAI(base_url=address, api_key=key)
messages = [{"role": "user", "content": task["prompt"]}]
for turn in range(task["turns"]):
    choice = "auto" if turn + 1 < task["turns"] else "none"
    tools = {"tools": task["tools"], "tool_choice": choice} if task["tools"] else {}
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=12, **tools)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "w0008"})
    if not message.tool_calls:
        messages.append({"role": "user", "content": "w0011"})
"""


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


class WordsHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: WordsData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        task = json.dumps({"prompt": data.prompt, "turns": data.turns, "tools": data.tools})
        words = [sys.executable, "-c", AGENT, endpoint, secret, ctx.model, task]
        return await runtime.run_program(words, {})


class WordsData(vf.TaskData):
    turns: int = 1
    tools: list[dict[str, Any]] = Field(default_factory=list)


class WordsTask(vf.Task[WordsData, vf.State]):
    @vf.reward(weight=0.5)  # type: ignore[untyped-decorator]
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.metric  # type: ignore[untyped-decorator]
    async def turns_asked(self, trace: vf.Trace) -> float:
        return float(self.data.turns)


class WordsConfig(vf.TasksetConfig):
    turns: int = 1
    tools: bool = False


class Words(vf.Taskset[WordsTask, WordsConfig]):
    def load(self) -> Iterable[WordsTask]:
        tools = [tool("add"), tool("lookup")] if self.config.tools else []
        for i in (2, 5, 8):
            data = WordsData(prompt=f"w{i:04d}", turns=self.config.turns, tools=tools)
            yield WordsTask(data, self.config.task)


__all__ = ["Words", "WordsHarness"]
