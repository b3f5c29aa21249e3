"""The model of a family is trained on what it generates in a recorded conversation, and no more.

Conversations are drawn at random, recorded as people record them; the families' templates are in
tests/templates.py, with their words for what the model generates.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.api.groups.data import PromptSource
from sluice.data import chat
from sluice.data.answers import Encoded, encode, parse_answer
from sluice.data.chat import PromptError
from tests.templates import FAMILIES, Family, Message

SOURCE = PromptSource(path="rows.jsonl")
TOOLS = [{"type": "function", "function": {"name": "weather", "description": None}}]
WORDS = st.text("abc ä{}\"'<>\n1", min_size=1, max_size=8).map(lambda text: f"w{text}w")
VALUES = WORDS | st.integers(-9, 9) | st.booleans() | st.none() | st.lists(st.integers(0, 9))
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "day", "unit"]), VALUES, max_size=2)


@st.composite
def recorded(draw: st.DrawFn, text: str) -> Any:
    """Draw a content in one of the forms in which it may be recorded."""
    return draw(st.sampled_from([text, [{"type": "text", "text": text}]]))


@st.composite
def calling(draw: st.DrawFn, family: Family) -> Message:
    count = draw(st.integers(1, family.calls))
    arguments = [draw(ARGUMENTS) for _ in range(count)]
    calls = [
        {"function": {"name": "weather", "arguments": draw(st.sampled_from([a, json.dumps(a)]))}}
        for a in arguments
    ]
    empty = [{"content": None}, {"content": ""}, {}]
    said = [{"content": draw(WORDS)}] if family.beside else []
    return {"role": "assistant", **draw(st.sampled_from(empty + said)), "tool_calls": calls}


@st.composite
def conversations(draw: st.DrawFn, family: Family) -> list[Message]:
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(recorded(draw(WORDS)))})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(recorded(draw(WORDS))), "name": None})
        for _ in range(draw(st.integers(0, 2)) if family.calls else 0):
            call = draw(calling(family))
            results = [{"role": "tool", "content": draw(WORDS)} for _ in call["tool_calls"]]
            messages += [call, *results]
        messages.append(
            {"role": "assistant", "content": draw(recorded(draw(WORDS))), "tool_calls": None}
        )
    newest = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and (
            (family.single and i < newest) or draw(st.integers(0, 4)) == 0
        ):
            message["loss_mask"] = 0
    if draw(st.booleans()) and messages[-2]["role"] == "tool":
        messages.pop()  # a recording that ends with the answer of a tool
    return messages


def expected(family: Family, messages: list[Message]) -> list[tuple[int, str, bool]]:
    """Return (position, text, ends its turn) of each trained answer."""
    newest = max(i for i, message in enumerate(messages) if message["role"] == "user")
    answers = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("loss_mask", 1):
            follows = messages[i + 1]["role"] if i + 1 < len(messages) else ""
            end = family.ends(message, follows)
            said = family.said({**message, "is_last": not follows}, i > newest)
            answers.append((i, said + (end or ""), end is not None))
    return answers


def runs(example: Encoded) -> list[tuple[int, int]]:
    """Return the runs of trained tokens as [start, end)."""
    spans, at = [], 0
    for trained, group in groupby(example.mask):
        size = len(list(group))
        if trained:
            spans.append((at, at + size))
        at += size
    return spans


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_is_trained_is_what_the_model_generates(family: Family, data: st.DataObject) -> None:
    messages = data.draw(conversations(family))
    tokenizer = family.tokenizer
    stops = [family.eos, *family.stops]
    answers = expected(family, messages)
    tools = TOOLS if family.calls else []
    row = parse_answer({"messages": messages, "tools": tools}, SOURCE)
    if answers and not any(ended for _, _, ended in answers):
        with pytest.raises(PromptError, match="would not learn to stop"):
            encode(tokenizer, row, stops=stops)
        return
    example = encode(tokenizer, row, stops=stops)
    trained = runs(example)
    assert [tokenizer.decode(example.tokens[a:b]) for a, b in trained] == [
        text for _, text, _ in answers
    ]
    for (start, _), (position, _, _) in zip(trained, answers, strict=True):
        prompt = chat.render(tokenizer, messages[:position], chat=True, tools=row.tools)
        assert tokenizer.decode(example.tokens[:start]) == prompt, "as the engine would be asked"
    whole = chat.render(tokenizer, messages, chat=True, tools=row.tools, opened=False)
    assert tokenizer.decode(example.tokens).removesuffix(family.eos) == whole.removesuffix(
        family.eos
    )
