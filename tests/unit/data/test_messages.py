"""Messages have one form before a chat template sees them, whatever their source."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.data import chat
from sluice.data.messages import MessageError, normalised
from sluice_rollout.gateway.interfaces.exchange import canonical
from tests.chat import tokenizer, user

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def calling(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}


def arguments_of(message: dict[str, Any]) -> Any:
    return normalised(message)["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(
            {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            id="null beside calls",
        ),
        pytest.param(
            {"role": "user", "content": "x", "tool_calls": None},
            {"role": "user", "content": "x"},
            id="null calls",
        ),
        pytest.param(
            {"role": "user", "content": "x", "tool_calls": []},
            {"role": "user", "content": "x"},
            id="no calls",
        ),
        pytest.param(
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
            {"role": "user", "content": "ab"},
            id="parts",
        ),
        pytest.param(
            {"role": "developer", "content": "x"}, {"role": "system", "content": "x"}, id="role"
        ),
        pytest.param(
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
            id="reasoning stays",
        ),
        pytest.param(
            {"role": "assistant", "tool_calls": [{"id": "c1", "name": "f", "arguments": {"a": 1}}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            id="a call without its function",
        ),
    ],
)
def test_the_form_that_templates_get(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert normalised(message) == expected
    assert normalised(expected) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"a": None}, {"a": None}),
        ('{"a": [1, null]}', {"a": [1, None]}),
        ("", {}),
        (None, {}),
        ("{a: 1", "{a: 1"),
    ],
    ids=["object", "text", "empty", "null", "no JSON"],
)
def test_arguments_are_an_object(arguments: Any, expected: Any) -> None:
    assert arguments_of(calling(arguments=arguments)) == expected


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": 3}, "content: expected a text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "expected a text, or parts of text"),
        ({"role": "assistant", "tool_calls": "f()"}, "tool_calls: expected a list"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, r"tool_calls\[0\]: expected"),
    ],
    ids=str,
)
def test_messages_that_no_template_could_render_are_refused(message: Any, problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        normalised(message)


def test_a_row_is_rendered_as_the_gateway_renders_the_same_request() -> None:
    """The gateway keeps what identifies a history and uses the same rendering for the rest."""
    recorded = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}], "name": None},
        user("weather in Bonn?"),
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "c1"}]},
        {"role": "tool", "content": [{"type": "text", "text": "11"}], "tool_call_id": "c1"},
    ]
    sent = [canonical(message, "messages[0]", {}) for message in recorded]
    printing = tokenizer("{% for message in messages %}{{ message | tojson }}\n{% endfor %}")
    [row, request] = [chat.render(printing, messages, chat=True) for messages in (recorded, sent)]
    assert row == request
    assert "null" not in row


def test_a_missing_chat_template_is_reported() -> None:
    with pytest.raises(chat.PromptError, match=r"the model has no chat template.*\.jinja"):
        chat.render(tokenizer(None), [user("hi")], chat=True)
