"""Arithmetic with a calculator in several turns: tool, prompts, conversations and reward.

    user       Calculate 7 * ( 81 - 63 ).
    assistant  <tool_call>{"name": "calculate", "arguments": {"expression": "81 - 63"}}</tool_call>
    tool       18
    assistant  <tool_call>{"name": "calculate", "arguments": {"expression": "7 * 18"}}</tool_call>
    tool       126
    assistant  126

The calculator computes one operation per call, so the model has to find the next operation and to
copy numbers. SmolLM2's chat template has no tools: a system message describes this one, and
messages of the role `tool` are written as all others.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sluice.rewards import RewardInput
from sluice_rollout.tools import ANSWER, ToolLoop

sys.path.insert(0, str(Path(__file__).parent))
import tasks  # type: ignore[import-not-found]

SYSTEM = (
    "You have a calculator for one operation on two numbers. Call it with "
    '<tool_call>{"name": "calculate", "arguments": {"expression": "12 * -3"}}</tool_call>, '
    "as often as you need. Then say the result."
)
OPERATION = re.compile(r"\s*(-?\d{1,40})\s*([-+*])\s*(-?\d{1,40})\s*")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
Row = dict[str, Any]


def calculate(expression: str) -> str:
    """Compute one operation: `12 * -3` -> `-36`. The model is told the errors."""
    if (match := OPERATION.fullmatch(expression)) is None:
        raise ValueError("expected one operation on two whole numbers, as 12 * -3")
    left, sign, right = match.groups()
    return str(OPERATORS[sign](int(left), int(right)))


play = ToolLoop([calculate], max_turns=8)
"""The job's generate function. What the calculator says is in the context, and not trained on."""


def rows(size: int, seed: int = 0, **settings: Any) -> Iterator[Row]:
    """Return prompts of reasoning-gym's basic_arithmetic after the message about the tool."""
    settings = {"operators": list(OPERATORS)} | settings
    for row in tasks.rows("basic_arithmetic", size, seed, **settings):
        yield row | {"prompt": [{"role": "system", "content": SYSTEM}, *row["prompt"]]}


def worked(size: int, seed: int = 0, **settings: Any) -> Iterator[Row]:
    """Return conversations for supervised fine-tuning, with all calls that a problem needs."""
    for row in rows(size, seed, **settings):
        facts = row["metadata"]["problem"]["metadata"]
        yield {"messages": [*row["prompt"], *solution(facts["expression"])]}


def solution(expression: str) -> list[Row]:
    """Return the turns of the model and of the calculator for an expression."""
    calls: list[str] = []
    result = work_out(ast.parse(expression, mode="eval").body, calls)
    turns: list[Row] = []
    for call in calls:
        text = json.dumps({"name": "calculate", "arguments": {"expression": call}})
        turns += [
            {"role": "assistant", "content": f"<tool_call>{text}</tool_call>"},
            {"role": "tool", "content": calculate(call)},
        ]
    return [*turns, {"role": "assistant", "content": result}]


def work_out(node: ast.expr, calls: list[str]) -> str:
    """Return the value of an expression, and append its operations to `calls`."""
    if isinstance(node, ast.BinOp):
        left, right = work_out(node.left, calls), work_out(node.right, calls)
        calls.append(f"{left} {SIGNS[type(node.op)]} {right}")
        return calculate(calls[-1])
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        calls.append(f"0 - {work_out(node.operand, calls)}")
        return calculate(calls[-1])
    return str(ast.literal_eval(node))


def right(sample: RewardInput) -> float:
    """Return 1 if the last turn is the right number and calls no tool."""
    last = str(sample.metadata.get(ANSWER, sample.response))
    if "<tool_call>" in last or sample.truncated:
        return 0.0
    return float(tasks.exact(replace(sample, response=last)))
