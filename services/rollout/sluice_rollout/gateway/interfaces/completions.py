"""OpenAI's /v1/completions: a text or token ids, which the model continues."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from sluice_rollout.gateway.interfaces import exchange
from sluice_rollout.gateway.interfaces.chat import usage
from sluice_rollout.gateway.interfaces.errors import GatewayError, invalid
from sluice_rollout.gateway.interfaces.exchange import Answer, TurnRequest
from sluice_rollout.gateway.interfaces.parameters import (
    Count,
    Parameters,
    SingleAnswer,
    Stops,
    checked,
)
from sluice_rollout.gateway.interfaces.streaming import Event


class CompletionParameters(Parameters):
    """Parameters of /v1/completions."""

    max_tokens: Count | None = None
    best_of: SingleAnswer = None
    stop: Stops = None


def read(body: dict[str, Any]) -> TurnRequest:
    """Read a request. Raises GatewayError."""
    parameters = checked(CompletionParameters, body)
    if body.get("echo") or body.get("suffix"):
        raise invalid("echo, suffix: not supported")
    return TurnRequest(
        prompt=_prompt(body.get("prompt")),
        max_tokens=parameters.max_tokens,
        stop=parameters.stop or [],
        settings=exchange.settings(body),
        calls=False,
    )


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        (value,) = value
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value):
        return value
    raise invalid("prompt: expected one text, or one list of token ids", "prompt")


def write(answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
    """Make the body of an answer."""
    choices = [_choice(answer.text, answer.finish)]
    return _frame(body) | {"choices": choices, "usage": usage(answer)}


class Events:
    """The chunks of an answer: its text, and at the end the finish reason and the usage."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._frame = _frame(body)

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        return iter(())

    def text(self, text: str) -> Iterator[Event]:
        yield self._frame | {"choices": [_choice(text, None)]}

    def end(self, answer: Answer) -> Iterator[Event]:
        choices = [_choice("", answer.finish)]
        yield self._frame | {"choices": choices, "usage": usage(answer)}

    def fail(self, error: GatewayError) -> Iterator[Event]:
        yield error.body


def _choice(text: str, finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}


def _frame(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.get("model", ""),
    }
