"""Requests of every interface: wrong ones are refused, and no body breaks the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import itertools
import json
import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sluice.engines.protocol import CallParser, Generation
from sluice_rollout.episode import Episode
from sluice_rollout.gateway import tool_call_parser
from sluice_rollout.gateway.endpoint import Gateway
from tests.unit.gateway.gateway_tools import open_registry, play_episode, token_ids
from tests.unit.rollout.scripted_engine import Script

TEXT = "hi"
USER = {"role": "user", "content": TEXT}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "any",
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "1"},
            {"role": "user", "name": "me", "content": [{"type": "text", "text": TEXT}]},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_tokens": 8,
    },
    "/v1/completions": {"model": "any", "prompt": TEXT, "max_tokens": 8},
    "/v1/responses": {
        "model": "any",
        "instructions": "Add.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "1"},
            USER,
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 8,
    },
    "/v1/messages": {
        "model": "any",
        "max_tokens": 8,
        "system": "Add.",
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": "1"}],
            },
            USER,
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}],
    },
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 8, "stop": ["#"]}},
}
STREAM_ENDS = [b"[DONE]", b'"message_stop"', b'"response.completed"', b'"response.incomplete"']
CHAT, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/messages", "/generate"


def deep(levels: int) -> Any:
    return json.loads("[" * levels + "]" * levels)


class Engine(Script):
    """An engine that never runs out of answers, most of them malformed tool calls."""

    TURNS = (
        "hello",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "<tool_call>" + "[" * 3000,
        '<tool_call>{"name": "add", "arguments": ' + "[" * 500 + "]" * 500 + "}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    )

    def __init__(self) -> None:
        super().__init__()
        self.sampling: list[dict[str, Any]] = []
        self.part_tokens = 500
        self._turns = itertools.cycle([token_ids(text) for text in self.TURNS])

    async def generate(
        self, rid: str, input_ids: list[int], sampling: dict[str, Any], **options: Any
    ) -> Generation:
        self.sampling.append(sampling)
        self.answers.append(next(self._turns))
        unlimited = sampling | {"max_new_tokens": 10_000}
        return await super().generate(rid, input_ids, unlimited, **options)


@dataclass
class OpenGateway:
    """A gateway that a thread keeps open for one endless episode."""

    engine: Engine = field(default_factory=Engine)
    gateway: Gateway | None = None

    def post(self, path: str, body: Any) -> tuple[int, bytes]:
        """Return the status and the answer. Raises HTTPException if the answer is cut off."""
        assert self.gateway
        host, port = self.gateway.router[0].rpartition("@")[2], self.gateway.router[1]
        connection = http.client.HTTPConnection(host, port, timeout=60)
        headers = {
            "Authorization": f"Bearer {self.gateway.api_key}",
            "Content-Type": "application/json",
        }
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request("POST", path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def reason(self, path: str, body: Any) -> tuple[int, str]:
        """Return the status and the message of a refusal."""
        status, answer = self.post(path, body)
        return status, str(json.loads(answer).get("error", {}).get("message", ""))


@pytest.fixture(scope="module")
def open_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenGateway]:
    opened, ready = OpenGateway(), threading.Event()
    loop, end = asyncio.new_event_loop(), asyncio.Event()

    async def play(episode: Episode) -> None:
        opened.gateway = episode.gateway
        ready.set()
        await end.wait()

    async def serve(directory: Path) -> None:
        limits = {"turns": 10**6, "branches": 10**6}
        async with open_registry(directory, rollout__limits=limits) as registry:
            await play_episode(registry, play, opened.engine, tokens=2000)

    directory = tmp_path_factory.mktemp("gateway")
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(directory)))
    thread.start()
    assert ready.wait(60)
    yield opened
    loop.call_soon_threadsafe(end.set)
    thread.join(60)
    loop.close()


TEXTS = st.one_of(
    st.text(st.characters(codec=None), max_size=6),
    st.sampled_from(
        ["", "auto", "none", "on", "false", "text", "function", "user", "tool", "\ud83d"]
    ),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([10**30, -(2**63), 2**31, 1e308, float("nan"), float("inf"), 10**4000]),
    TEXTS,
    st.sampled_from([[], {}, [1], [[]], {"type": []}, deep(80), "x" * 5000, ["#"] * 40]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
NAMES = [
    "model", "messages", "prompt", "input", "text", "input_ids", "system", "instructions", "tools",
    "tool_choice", "thinking", "stream", "stream_options", "stop", "stop_sequences", "n",
    "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p",
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "seed", "response_format", "previous_response_id", "background", "conversation", "echo",
    "suffix", "sampling_params", "metadata",
]  # fmt: skip
SAMPLING_NAMES = [
    "max_new_tokens", "stop", "stop_token_ids", "skip_special_tokens", "no_stop_trim", "n",
    "temperature", "top_p", "top_k", "seed",
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*at, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*at, key))


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw an interface and a body for it, with some values replaced or added."""
    path = draw(st.sampled_from([*BODIES]))
    body = json.loads(json.dumps(BODIES[path]))
    for place in draw(st.lists(st.sampled_from([*places(body)]), max_size=2)):
        value = draw(VALUES)
        with contextlib.suppress(TypeError, LookupError):  # the holder was replaced before
            holder = functools.reduce(operator.getitem, place[:-1], body)
            holder[place[-1]] = value
    if isinstance(body.get("sampling_params"), dict):
        body["sampling_params"] |= draw(
            st.dictionaries(st.sampled_from(SAMPLING_NAMES), VALUES, max_size=2)
        )
    body |= draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2))
    if draw(st.booleans()) and path != GENERATE:
        body["stream"] = True
    return path, body


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(request=requests())
@example((CHAT, {"messages": [{"role": "user", "content": [{"type": []}]}]}))
@example((MESSAGES, {"messages": [{"role": "user", "content": [{"type": {}}]}]}))
@example(("/v1/responses", {"input": [{"role": "user", "content": [{"type": []}]}]}))
def test_every_body_is_answered_or_refused(
    open_gateway: OpenGateway, request: tuple[str, Any]
) -> None:
    path, body = request
    try:
        raw = json.dumps(body).encode()
    except ValueError:  # an integer of more digits than Python writes
        return
    status, answer = open_gateway.post(path, raw)
    assert status in (200, 400), answer
    if status == 400:
        assert json.loads(answer)["error"]["message"]
    elif body.get("stream") is True:
        assert any(end in answer.rpartition(b"data: ")[2] for end in STREAM_ENDS)
    else:
        json.loads(answer)


@pytest.mark.parametrize("turn", Engine.TURNS[2:], ids=["brackets", "deep", "surrogate", "digits"])
def test_a_malformed_call_of_the_model_is_text(turn: str) -> None:
    assert tool_call_parser.parse(turn, BODIES[CHAT]["tools"], tool_call_parser.hermes) == (
        turn,
        [],
    )


@pytest.mark.parametrize("arguments", ["\ud83d", None], ids=["a surrogate", "an error"])
def test_a_turn_at_which_the_parser_fails_is_text(arguments: str | None) -> None:
    def parser(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        if arguments is None:
            raise RecursionError("too deep")
        return "", [("add", arguments)]

    assert tool_call_parser.parse("a call", BODIES[CHAT]["tools"], CallParser(parser)) == (
        "a call",
        [],
    )


@pytest.mark.parametrize("path", [*BODIES])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_body_that_is_mutated_is_a_good_one(
    open_gateway: OpenGateway, path: str, stream: bool
) -> None:
    extra = {"stream": True} if stream and path != GENERATE else {}
    assert open_gateway.post(path, BODIES[path] | extra)[0] == 200


STOPS = {CHAT: "stop", "/v1/completions": "stop", MESSAGES: "stop_sequences"}
REFUSED = [
    *(
        pytest.param(path, {name: value}, reason, id=f"{name} of {path}: {case}")
        for path, name in STOPS.items()
        for case, value, reason in [
            ("a megabyte", ["x" * 2**20], "1024 bytes"),
            ("too many", ["x"] * 33, "32"),
            ("an empty one", [""], "empty"),
            ("half of a surrogate pair", ["\ud83d"], "surrogate"),
            ("a number", [1], name),
        ]
    ),
    pytest.param(CHAT, {"stream": "false"}, "stream", id="a word for a truth value"),
    pytest.param(CHAT, {"stream": True, "stream_options": [1]}, "stream_options", id="options"),
    pytest.param(CHAT, {"temperature": "hot"}, "temperature", id="temperature in words"),
    pytest.param(CHAT, {"temperature": -1}, "temperature", id="temperature below 0"),
    pytest.param(CHAT, {"temperature": float("nan")}, "finite", id="no number"),
    pytest.param(CHAT, {"top_p": 1.5}, "top_p", id="a share above 1"),
    pytest.param(CHAT, {"max_tokens": True}, "max_tokens", id="a truth value for a number"),
    pytest.param(CHAT, {"tool_choice": 3}, "tool_choice", id="a number as a choice"),
    pytest.param(CHAT, {"metadata": deep(100)}, "nested", id="a deep body"),
    pytest.param(CHAT, {"metadata": {"\udc00": 1}}, "surrogate", id="a surrogate in a name"),
    pytest.param(MESSAGES, {"tool_choice": "auto"}, "tool_choice", id="Anthropic's choice"),
    pytest.param(MESSAGES, {"stop_sequences": "x"}, "list", id="Anthropic's stop as a text"),
    pytest.param(MESSAGES, {"thinking": "on"}, "thinking", id="Anthropic's thinking"),
    pytest.param(MESSAGES, {"temperature": "hot"}, "temperature", id="Anthropic's temperature"),
    pytest.param("/v1/responses", {"temperature": "hot"}, "temperature", id="of responses"),
    pytest.param("/v1/responses", {"instructions": [1]}, "instructions", id="instructions"),
    pytest.param(
        GENERATE, {"sampling_params": {"temperature": "hot"}}, "temperature", id="of SGLang's"
    ),
    pytest.param(
        GENERATE, {"sampling_params": {"stop": ["x" * 2**20]}}, "1024 bytes", id="SGLang's stop"
    ),
    pytest.param(
        GENERATE,
        {"sampling_params": {"stop_token_ids": [1] * 500_000}},
        "stop_token_ids",
        id="half a million ids",
    ),
    pytest.param(
        GENERATE,
        {"sampling_params": {"stop_token_ids": [-1]}},
        "stop_token_ids",
        id="an id below 0",
    ),
    pytest.param(
        GENERATE,
        {"sampling_params": {"stop_token_ids": [99_999]}},
        "vocabulary",
        id="an id outside the vocabulary",
    ),
]


@pytest.mark.parametrize(("path", "change", "reason"), REFUSED)
def test_a_wrong_value_is_refused_with_the_reason(
    open_gateway: OpenGateway, path: str, change: dict[str, Any], reason: str
) -> None:
    before = len(open_gateway.engine.sampling)
    status, message = open_gateway.reason(path, BODIES[path] | change)
    assert status == 400
    assert reason in message
    assert len(message) < 500
    assert len(open_gateway.engine.sampling) == before, "the engine sees nothing of it"


def test_the_jobs_own_stops_are_not_doubled(open_gateway: OpenGateway) -> None:
    params = {"max_new_tokens": 8, "stop": ["#", "#"], "stop_token_ids": [3, 3]}
    assert open_gateway.post(GENERATE, {"text": "stops", "sampling_params": params})[0] == 200
    assert open_gateway.engine.sampling[-1]["stop"] == ["#"]
    assert open_gateway.engine.sampling[-1]["stop_token_ids"] == [3]
