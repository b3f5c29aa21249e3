"""Calls of tools: found in what the model says, answered, and written as the chat
template would.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sluice.data.chat import between_turns
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.tools import (
    ANSWER,
    CALLS,
    ToolCall,
    ToolLoop,
    hermes_calls,
    json_calls,
)
from tests.unit.rollout.scripted_engine import PROMPT, Script, scripted_runner

ADD = ToolCall("add", {"a": 1, "b": 2})
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("3", []),
        (f"<tool_call>{CALL}</tool_call>", [ADD]),
        (
            f"<think>hm</think>\n<tool_call>\n{CALL}\n</tool_call> and "
            f"<tool_call>{CALL}</tool_call>",
            [ADD, ADD],
        ),
        (f"<tool_call>{CALL}", [ADD]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', [ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now")]),
    ],
    ids=["none", "one", "thought and two", "unclosed", "arguments in json", "no arguments"],
)
def test_calls_as_hermes_writes_them(text: str, calls: list[ToolCall]) -> None:
    assert hermes_calls(text) == calls


@pytest.mark.parametrize(("text", "error"), [
    ("<tool_call>add 1 2</tool_call>", "the tool call: not valid JSON"),
    ("<tool_call>[1]</tool_call>", "a tool call is an object"),
    ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "a tool call is an object"),
    ('<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "the arguments: not valid JSON"),
    ("<tool_call>" + "[" * 3000, "the tool call: nested more than 64 deep"),
    ('<tool_call>{"name": "a\\ud83d"}</tool_call>', "the tool call.name: half of a surrogate pair"),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1e999}"}', "the arguments: 1e999 is not"),
])  # fmt: skip
def test_a_call_that_cannot_be_understood(text: str, error: str) -> None:
    [call] = hermes_calls(text)
    assert call.error.startswith(error)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CALL, [ADD]),
        (f"[{CALL}, {CALL}]", [ADD, ADD]),
        (f"So:\n```json\n{CALL}\n```", [ADD]),
        ("3", []),
        ("{}", []),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ("the answer is {3}", []),
    ],
    ids=["bare", "list", "fenced", "number", "empty", "parameters", "braces"],
)
def test_calls_in_plain_json(text: str, calls: list[ToolCall]) -> None:
    assert json_calls(text) == calls


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    words = ["<pad>", "<user>", "<assistant>", "<tool>", "<end>", "?", "3", "%sluice-turn%"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.mark.parametrize(("last", "expected"), [
    (4, "<tool> 3 <end> <assistant>"), (6, "<end> <tool> 3 <end> <assistant>"),
])  # fmt: skip
def test_the_chat_template_writes_the_text_between_turns(
    tokenizer: Any, last: int, expected: str
) -> None:
    ids = between_turns(tokenizer, [{"role": "tool", "content": "3"}], last)
    assert tokenizer.convert_ids_to_tokens(ids) == expected.split()


def add(a: int, b: int) -> int:
    return a + b


async def slow() -> None:
    await asyncio.sleep(60)


async def later() -> str:
    return "now"


class Chatty(Script):
    """Turns by their text: the model that says them."""

    def decode(self, ids: list[int]) -> str:
        return self.texts[ids[0]]

    def __init__(self, *texts: str) -> None:
        super().__init__(*([100 + i, 4] for i in range(len(texts))))
        self.texts = {100 + i: text for i, text in enumerate(texts)}


async def played(loop: ToolLoop, tokenizer: Any, *texts: str) -> tuple[Sample, Chatty]:
    engine = Chatty(*texts)
    runner = scripted_runner(loop, engine)
    runner.tokenizer, runner.generator.decode = tokenizer, engine.decode
    return await runner(Prompt(0, "?"), PROMPT, Sample(0), {"max_new_tokens": 100}), engine


async def test_tools_are_called_until_the_model_answers(tokenizer: Any) -> None:
    sample, engine = await played(
        ToolLoop([add, later]), tokenizer, f"<tool_call>{CALL}</tool_call>", "it is 3"
    )
    assert engine.prompt_ids[1] == [
        *PROMPT,
        100,
        4,
        *tokenizer.encode("<tool> 3 <end> <assistant>"),
    ]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
    assert (sample.metadata[CALLS], sample.metadata[ANSWER]) == (1, "it is 3")
    assert sample.status is SampleStatus.COMPLETED


async def test_turns_are_counted(tokenizer: Any) -> None:
    sample, engine = await played(
        ToolLoop([add], max_turns=2), tokenizer, *[f"<tool_call>{CALL}</tool_call>"] * 3
    )
    assert (len(engine.prompt_ids), sample.metadata[CALLS]) == (2, 1)


def halves() -> str:
    return "a\ud83db"


def raises() -> None:
    raise ValueError("\ud83d")


def nests() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(("call", "answer"), [
    (ADD, "3"), (ToolCall("later"), "now"), (ToolCall("add", {"a": 1}), "error: TypeError: "),
    (ToolCall("sub"), "error: there is no tool 'sub'; there is add, later, slow, halves, raises"),
    (ToolCall("", error="no"), "error: no"),
    (ToolCall("halves"), "a\ufffdb"), (ToolCall("raises"), "error: ValueError: \ufffd"),
    (ToolCall("nests"), "error: RecursionError"),
])  # fmt: skip
async def test_the_model_sees_the_errors_of_tools(call: ToolCall, answer: str) -> None:
    loop = ToolLoop([add, later, slow, halves, raises, nests])
    result = await loop._answer(call, loop._opened())
    assert result.startswith(answer)
    result.encode()


async def test_the_model_sees_that_a_tool_hangs() -> None:
    loop = ToolLoop([slow], seconds=0.05)
    answer = await loop._answer(ToolCall("slow"), loop._opened())
    assert answer == "error: no answer after 0.05 s"
