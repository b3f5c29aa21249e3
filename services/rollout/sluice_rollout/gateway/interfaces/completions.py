"""OpenAI's /v1/completions: a text or token ids, which the model continues."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from sluice_rollout.gateway.interfaces import exchange
from sluice_rollout.gateway.interfaces.chat import usage
from sluice_rollout.gateway.interfaces.errors import invalid
from sluice_rollout.gateway.interfaces.exchange import Answer, TurnRequest
from sluice_rollout.gateway.interfaces.parameters import (
    Count,
    Parameters,
    SingleAnswer,
    Stops,
    checked,
)


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
    choice = {"index": 0, "text": answer.text, "finish_reason": answer.finish, "logprobs": None}
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.get("model", ""),
        "choices": [choice],
        "usage": usage(answer),
    }


def stream(answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answer as one chunk."""
    yield write(answer, body)
