"""Observations of OpenEnv as text, and answers of a model as its actions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.api.groups.environment import OpenEnvironment
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Messages, Prompt
from sluice_rollout.environments import openenv_text as text
from sluice_rollout.environments.openenv import openenv_of, options_of

MESSAGE = {"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]}
MOVE = {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}


@pytest.mark.parametrize(
    ("answer", "schema", "field", "action"),
    [
        pytest.param("Hi", MESSAGE, None, {"message": "Hi"}, id="the only field"),
        pytest.param("<think>x</think>\nHi", MESSAGE, None, {"message": "Hi"}, id="no thoughts"),
        pytest.param("Hi", MOVE, "say", {"say": "Hi"}, id="a field that is named"),
        pytest.param('{"x": 1, "y": 2}', MOVE, None, {"x": 1, "y": 2}, id="JSON"),
        pytest.param('I go:\n```json\n{"x": 1}\n```', MOVE, None, {"x": 1}, id="fenced"),
        pytest.param(
            "Hi", {"properties": {"text": {"type": "string"}}}, None, {"text": "Hi"}, id="optional"
        ),
    ],
)
def test_an_answer_is_an_action(
    answer: str, schema: dict[str, Any], field: str | None, action: dict[str, Any]
) -> None:
    assert text.action_of(answer, schema, field) == action


@pytest.mark.parametrize("answer", ["left", "[1, 2]", ""])
def test_the_error_of_an_invalid_action_says_what_was_expected(answer: str) -> None:
    with pytest.raises(text.ActionError, match="expected a JSON object with x, y"):
        text.action_of(answer, MOVE)


@pytest.mark.parametrize(
    ("observation", "field", "words"),
    [
        pytest.param({"told": "hello", "length": None}, None, "hello", id="the only text"),
        pytest.param({"told": "a", "n": 1}, None, '{"told": "a", "n": 1}', id="several"),
        pytest.param({"told": "a", "n": 1}, "n", "1", id="a field"),
        pytest.param({"told": "a"}, "told", "a", id="a field of text"),
        pytest.param({"told": "a"}, "board", "", id="a field that is not there"),
    ],
)
def test_an_observation_is_text(observation: dict[str, Any], field: str | None, words: str) -> None:
    assert text.shown(observation, field) == words


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        pytest.param("Play.", [user("Play.\n\nboard")], id="a text"),
        pytest.param("", [user("board")], id="no text"),
        pytest.param(
            [{"role": "system", "content": "s"}],
            [{"role": "system", "content": "s"}, user("board")],
            id="a system prompt",
        ),
        pytest.param([user("Play.")], [user("Play.\n\nboard")], id="messages"),
    ],
)
def test_the_first_observation_follows_the_rows_prompt(
    prompt: str | Messages, messages: Messages
) -> None:
    assert text.opening(prompt, "board") == messages


def test_tools_go_to_the_model_and_its_calls_to_the_environment() -> None:
    (tool,) = text.definitions([{"name": "add", "description": "d", "input_schema": {"a": 1}}])
    assert tool["function"] == {"name": "add", "description": "d", "parameters": {"a": 1}}
    call = {"function": {"name": "add", "arguments": json.dumps({"n": 1})}}
    assert text.call_of(call) == {"type": "call_tool", "tool_name": "add", "arguments": {"n": 1}}
    for broken in ("{", "[1]"):
        with pytest.raises(text.ActionError, match="the arguments"):
            text.call_of({"function": {"name": "add", "arguments": broken}})


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        pytest.param({"tool_name": "add", "result": 3}, "3", id="a value"),
        pytest.param({"result": {"data": "three", "content": []}}, "three", id="FastMCP's"),
        pytest.param({"result": None, "error": {"message": "no"}}, "error: no", id="an error"),
    ],
)
def test_the_result_of_a_call_is_text(observation: dict[str, Any], words: str) -> None:
    assert text.result_of(observation) == words


def test_samples_of_a_prompt_play_the_same() -> None:
    assert options_of(Prompt(5, "?")) == {"seed": 5}
    chosen = Prompt(5, "?", metadata={"reset": {"seed": 1, "level": 3}})
    assert options_of(chosen) == {"seed": 1, "level": 3}


def test_a_function_that_is_not_there_ends_the_worker() -> None:
    settings = OpenEnvironment(url="http://e:1", function="no.such:thing")
    with pytest.raises(ConfigurationError, match=r"openenv\.function: no\.such:thing"):
        openenv_of(settings, "tiny")
