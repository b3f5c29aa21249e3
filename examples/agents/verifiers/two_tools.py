"""A taskset of verifiers 0.4 that does not know sluice: questions, an agent, and the reward.

    pip install -e .          next to verifiers; `two_tools` is then its id

A question is for one of two tools: `7 * 8 + 5 =` for the calculator, `shelf 0 =` for the shelf.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any, Literal

import verifiers.v1 as vf
from openai import AsyncOpenAI

MOST_TURNS, TRAINING, HELD_OUT = 4, 4096, 64
SHELF = dict(zip("0123456789", "7305918264", strict=True))
NOTHING = {"type": "object", "properties": {}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": NOTHING}}
    for name, text in (
        ("calculate", "The last digit of the calculation that is asked for."),
        ("lookup", "The digit that is written on the shelf that is asked for."),
    )
]
CLIENT = AsyncOpenAI(api_key="of an episode")
"""Episodes take it over as it is: to make one takes longer than all else that they do."""


def use(name: str, question: str) -> str:
    """Return the tool's answer to a question, or `error` for a question of the other tool."""
    words = question.split()
    if name == "lookup":
        return SHELF.get(words[1], "error")
    try:
        return str((int(words[0]) * int(words[2]) + int(words[4])) % 10)
    except (IndexError, ValueError):
        return "error"


class QuestionData(vf.TaskData):
    """A question.

    tool: the tool that it is for. answer: the tool's answer. for_call: fraction of the reward that
    the call alone gets.
    """

    tool: str
    answer: str
    for_call: float


class Question(vf.Task[QuestionData, vf.State]):
    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: vf.Trace) -> float:
        """Pay half for one call of the right tool, and half for the right answer after it.

        Held-out questions count the answer alone. A guess is not paid: a small model learns to
        guess sooner than to call and to read.
        """
        if self.data.for_call and called(trace) != [self.data.tool]:
            return 0.0
        return self.data.for_call + (1 - self.data.for_call) * self._answered(trace)

    @vf.metric  # type: ignore[untyped-decorator]
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(called(trace)))

    def _answered(self, trace: vf.Trace) -> bool:
        last = trace.assistant_messages[-1]
        return not last.tool_calls and last.content == self.data.answer and not trace.is_truncated


def called(trace: vf.Trace) -> list[str]:
    """Return the tools that the model has called, in order."""
    return [call.name for m in trace.assistant_messages for call in m.tool_calls or []]


class Agent(vf.Harness[vf.HarnessConfig]):
    """Asks the model and runs its calls until it answers.

    It needs no separate program: verifiers sees its requests at `endpoint`.
    """

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
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        client = CLIENT.with_options(base_url=endpoint, api_key=secret)
        question = str(data.prompt)
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(MOST_TURNS):
            answer = await client.chat.completions.create(
                model=ctx.model, messages=messages, tools=TOOLS
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                assert call.type == "function"
                text = use(call.function.name, question)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class TwoToolsConfig(vf.TasksetConfig):
    split: Literal["train", "held_out"] = "train"


class TwoTools(vf.Taskset[Question, TwoToolsConfig]):
    def load(self) -> Iterable[Question]:
        """Load the questions. The splits share shelf questions, but no calculation."""
        draw, half = random.Random(1234), HELD_OUT // 2
        sums = [f"{a} * {b} + {c} =" for a, b, c in itertools.product(range(10), repeat=3)]
        draw.shuffle(sums)
        shelf = [f"shelf {number} =" for number in SHELF]
        if self.config.split == "held_out":
            for question in [*sums[:half], *itertools.islice(itertools.cycle(shelf), half)]:
                yield self._task(question, for_call=0.0)
        else:
            for i in range(TRAINING):
                yield self._task(draw.choice((sums[half:], shelf)[i % 2]), for_call=0.5)

    def _task(self, question: str, for_call: float) -> Question:
        tool = "lookup" if question.startswith("shelf") else "calculate"
        answer = use(tool, question)
        data = QuestionData(prompt=question, tool=tool, answer=answer, for_call=for_call)
        return Question(data, self.config.task)


__all__ = ["Agent", "TwoTools"]
