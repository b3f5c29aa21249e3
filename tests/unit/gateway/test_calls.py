"""Tool calls: by the engine's own parsers, and as Hermes writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.environment import ConfigurationError
from sluice_rollout.gateway.calls import parser_of
from tests.unit.buffer.buffer_tools import make_job

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
]
HERMES = 'Well. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CODER = (
    "Well.\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n"
    "</tool_call>"
)
LLAMA = '<|python_tag|>{"name": "weather", "parameters": {"city": "Bern"}}'


@pytest.mark.parametrize(
    ("arguments", "text", "rest"),
    [
        pytest.param({}, HERMES, "Well.", id="none named"),
        pytest.param({"toolCallParser": "qwen25"}, HERMES, "Well.", id="qwen25"),
        pytest.param({"tool-call-parser": "qwen3_coder"}, CODER, "Well.", id="qwen3_coder"),
        pytest.param({"toolCallParser": "llama3"}, LLAMA, "", id="llama3"),
    ],
)
def test_a_call_is_read_as_the_jobs_parser_writes_it(
    arguments: dict[str, str], text: str, rest: str, tmp_path: Path
) -> None:
    parse = parser_of(make_job(tmp_path, rollout__engineArgs=arguments).spec)
    remainder, [(name, parameters)] = parse(text, TOOLS)
    assert (remainder.strip(), name, json.loads(parameters)) == (rest, "weather", {"city": "Bern"})
    assert parse("Just a text.", TOOLS) == ("Just a text.", [])


def test_a_call_that_cannot_be_read_stays_text(tmp_path: Path) -> None:
    parse = parser_of(make_job(tmp_path).spec)
    broken = '<tool_call>{"name": "weather", "arguments": </tool_call>'
    assert parse(broken, TOOLS) == (broken, [])


@pytest.mark.parametrize(
    ("engine", "name", "reason"),
    [("sglang", "nobody", "nobody"), ("vllm", "glm45", "not to be had in the worker")],
)
def test_a_parser_that_is_not_there_is_a_configuration_error(
    engine: str, name: str, reason: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"engineArgs": {"toolCallParser": name}, "engine": engine}
    spec = make_job(tmp_path, **{f"rollout__{k}": v for k, v in changes.items()}).spec
    with pytest.raises(ConfigurationError, match=f"engineArgs.toolCallParser: .*{reason}"):
        parser_of(spec)
