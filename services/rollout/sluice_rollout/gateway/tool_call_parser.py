"""Reads tool calls in a turn, with the engine's parser or as Hermes and Qwen write them."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from sluice import input_checks
from sluice.api import RLJobSpec
from sluice.engines import engine_of
from sluice.engines.protocol import CallParser
from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry import failure_log
from sluice_rollout.gateway.interfaces.exchange import AnswerToolCall
from sluice_rollout.tool_calls import hermes_calls

_FIELD = "spec.rollout.engineArgs"
_HERMES = re.compile(r"\s*<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_LIKE_HERMES = {"hermes", "qwen", "qwen25"}


def _hermes(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """Read calls as Hermes and Qwen write them.

    If one call of a turn cannot be read, the whole turn is text.
    """
    calls = hermes_calls(text)
    if not calls or any(call.error for call in calls):
        return text, []
    return _HERMES.sub("", text), [(call.name, json.dumps(call.arguments)) for call in calls]


hermes = CallParser(_hermes, "<tool_call>")


def parser_of(spec: RLJobSpec) -> CallParser:
    """Return the parser that the job names (`engineArgs.toolCallParser`), or `hermes`.

    Raises ConfigurationError if the parser is unknown or is not installed here.
    """
    for key, name in spec.rollout.engine_args.items():
        if re.sub("[^a-z]", "", key.lower()) == "toolcallparser":
            return _named(spec, key, str(name))
    return hermes


def _named(spec: RLJobSpec, key: str, name: str) -> CallParser:
    if name in _LIKE_HERMES:
        return hermes
    try:
        return engine_of(spec).call_parser(name)
    except ImportError as error:
        raise ConfigurationError(
            f"{_FIELD}.{key}: {name!r} is not installed in the worker ({error}); expected one of "
            f"{', '.join(sorted(_LIKE_HERMES))}, or a worker image with the engine in it"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{_FIELD}.{key}: {error}") from error


def parse(
    text: str, tools: list[dict[str, Any]], parser: CallParser
) -> tuple[str, list[AnswerToolCall]]:
    """Split a turn into its text and its tool calls, each with a new id.

    If the parser fails, the whole turn is text.
    """
    try:
        rest, calls = parser.parse(text, tools)
        for call in calls:  # clients send calls back, so they must be valid UTF-8
            input_checks.check_value([*call], "call")
    except Exception as error:  # a parser may raise anything on a model's text
        failure_log.LOG.note("a tool call cannot be read", error)
        return text, []
    if not calls:
        return text, []
    return rest, [AnswerToolCall(f"call_{uuid.uuid4().hex}", *call) for call in calls]
