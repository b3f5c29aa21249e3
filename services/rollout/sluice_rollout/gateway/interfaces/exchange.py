"""Requests and answers at the gateway, whichever of OpenAI's interfaces a client speaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sluice.data import messages as chat_messages
from sluice.data.messages import MessageError, arguments_text
from sluice.samples.sample import Messages
from sluice_rollout.gateway.interfaces.errors import invalid

_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "seed": None,
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
}
"""Settings that change the distribution that tokens are drawn from; their values that do not."""
_FREE_CHOICES = (None, "auto", "none")


@dataclass(frozen=True, slots=True)
class AnswerToolCall:
    """A tool call of the model. arguments: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class RawFormat:
    """The form in which a program wants the text of a turn, and the ids that end one beside the
    job's stops.
    """

    skip_special_tokens: bool = True
    keep_stop: bool = False
    stop_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn that a client asks for.

    messages: as `canonical` has them; else prompt: a text or token ids, for /v1/completions.
    settings: what it asks of sampling. calls: the answer may be tool calls. raw: the program keeps
    its tokens itself.
    """

    messages: Messages = field(default_factory=list)
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    calls: bool = True
    raw: RawFormat | None = None

    @property
    def size(self) -> int:
        """Characters of it, roughly."""
        texts = len(self.prompt or ()) + len(str(self.tools or ""))
        return texts + sum(
            len(message["content"]) + len(str(message.get("tool_calls", "")))
            for message in self.messages
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's turn. finish: stop, length or tool_calls. stop: the stop string that ended it.
    sampled: its ids with their log-probs.
    """

    text: str
    calls: list[AnswerToolCall]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    stop: str | None = None
    sampled: list[tuple[int, float]] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """As `canonical` has it when a client sends it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [call_message(c.id, c.name, c.arguments) for c in self.calls]
        return message


def call_message(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call in a message."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def canonical(message: Any) -> dict[str, Any]:
    """A message with what counts of it, so that equal ones are equal. Raises GatewayError."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid("messages: expected objects with a `role` and a `content`", "messages")
    kept: dict[str, Any] = {
        "role": "system" if message["role"] == "developer" else message["role"],
        "content": text_of(message.get("content")),
    }
    kept |= {key: str(message[key]) for key in ("name", "tool_call_id") if message.get(key)}
    if message.get("tool_calls"):
        try:
            kept["tool_calls"] = [
                call_message(
                    str(call.get("id")),
                    str(call["function"]["name"]),
                    arguments_text(call["function"]),
                )
                for call in message["tool_calls"]
            ]
        except (TypeError, KeyError, AttributeError) as error:
            raise invalid(
                "messages: a tool call is {id, type, function: {name, arguments}}", "messages"
            ) from error
    return kept


def text_of(content: Any) -> str:
    """The text of a message. Raises GatewayError where it has anything else, as an image."""
    try:
        return chat_messages.text_of(content)
    except MessageError as error:
        raise invalid(f"messages: {error}", "messages") from error


def settings(body: dict[str, Any]) -> dict[str, Any]:
    """The settings of a request that would change the distribution that tokens are drawn from."""
    asked = {
        name: body[name]
        for name, default in _DEFAULTS.items()
        if body.get(name) is not None and body[name] != default
    }
    # A temperature that is OpenAI's default may still differ from the job's.
    asked |= {n: body[n] for n in ("temperature", "top_p") if body.get(n) is not None}
    if body.get("tool_choice") not in _FREE_CHOICES:
        asked["tool_choice"] = body["tool_choice"]
    return asked


def overridden_settings(asked: dict[str, Any], sampling: dict[str, Any]) -> Iterable[str]:
    """Names of the settings that differ from the job's, which hold."""
    return [n for n, value in asked.items() if n not in sampling or value != sampling[n]]


def is_function(function: Any) -> bool:
    """True for the description of a function that a chat template can write."""
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters") or {}, dict)
    )
