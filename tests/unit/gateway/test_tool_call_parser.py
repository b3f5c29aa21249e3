"""Tool calls are read by the engine's parsers, and as Hermes writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.runtime.pod_env import ConfigurationError
from sluice_rollout.gateway.tool_call_parser import parser_of
from tests.unit.buffer.buffer_tools import make_job

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
]
ARGUMENTS = '{"city": "Bern", "days": 2}'
HERMES = f'Well. <tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CODER = (
    "Well.\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
LLAMA = f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}'
LLAMA4 = '[weather(city="Bern", days=2)]'
GLM45 = (
    "Well.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
GLM47 = GLM45.replace("\n", "")
_V3 = "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
DEEPSEEK_V3 = _V3.format(f"function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```")
DEEPSEEK_V31 = _V3.format(f"weather<｜tool▁sep｜>{ARGUMENTS}")
DEEPSEEK_V32 = (
    'Well.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Bern</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
KIMI = (
    "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
)
THOUGHT = "<|channel|>analysis<|message|>Well.<|end|>"
OSS = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"
OSS_NAME_FIRST = (
    f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}"
)
MISTRAL = f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]'


@pytest.mark.parametrize(
    ("arguments", "text", "rest"),
    [
        pytest.param({}, HERMES, "Well.", id="none named"),
        pytest.param({"toolCallParser": "qwen25"}, HERMES, "Well.", id="qwen25"),
        pytest.param({"tool-call-parser": "qwen3_coder"}, CODER, "Well.", id="qwen3_coder"),
        pytest.param({"toolCallParser": "llama3"}, LLAMA, "", id="llama3"),
        pytest.param({"toolCallParser": "pythonic"}, LLAMA4, "", id="pythonic: llama 4"),
        pytest.param({"toolCallParser": "glm45"}, GLM45, "Well.", id="glm45"),
        pytest.param({"toolCallParser": "glm47"}, GLM47, "Well.", id="glm47"),
        pytest.param({"toolCallParser": "deepseekv3"}, DEEPSEEK_V3, "Well.", id="deepseekv3"),
        pytest.param({"toolCallParser": "deepseekv31"}, DEEPSEEK_V31, "Well.", id="deepseekv31"),
        pytest.param({"toolCallParser": "deepseekv32"}, DEEPSEEK_V32, "Well.", id="deepseekv32"),
        pytest.param({"toolCallParser": "kimi_k2"}, KIMI, "Well.", id="kimi_k2"),
        pytest.param({"toolCallParser": "mistral"}, MISTRAL, "", id="mistral"),
        pytest.param({"toolCallParser": "gpt-oss"}, OSS, "", id="gpt-oss: at once"),
        pytest.param(
            {"toolCallParser": "gpt-oss"}, THOUGHT + "<|start|>assistant" + OSS, "",
            id="gpt-oss: behind a thought",
        ),
        pytest.param(
            {"toolCallParser": "gpt-oss"}, THOUGHT + "<|start|>assistant" + OSS_NAME_FIRST, "",
            id="gpt-oss: the name first",
        ),
        pytest.param({"toolCallParser": "gpt-oss"}, OSS + "<|call|>", "", id="gpt-oss: ended"),
    ],
)  # fmt: skip
def test_a_call_is_read_as_the_jobs_parser_writes_it(
    arguments: dict[str, str], text: str, rest: str, tmp_path: Path
) -> None:
    parse = parser_of(make_job(tmp_path, rollout__engineArgs=arguments).spec).parse
    remainder, [(name, parameters)] = parse(text, TOOLS)
    assert (remainder.strip(), name) == (rest, "weather")
    assert json.loads(parameters) == json.loads(ARGUMENTS)
    assert parse("Just a text.", TOOLS) == ("Just a text.", [])


def test_an_answer_of_gpt_oss_without_a_call_stays_as_it_is(tmp_path: Path) -> None:
    parse = parser_of(
        make_job(tmp_path, rollout__engineArgs={"toolCallParser": "gpt-oss"}).spec
    ).parse
    answer = THOUGHT + "<|start|>assistant<|channel|>final<|message|>It goes to=Bern."
    assert parse(answer, TOOLS) == (answer, [])


def test_a_call_that_cannot_be_read_stays_text(tmp_path: Path) -> None:
    parse = parser_of(make_job(tmp_path).spec).parse
    broken = '<tool_call>{"name": "weather", "arguments": </tool_call>'
    assert parse(broken, TOOLS) == (broken, [])


@pytest.mark.parametrize(
    ("engine", "name", "reason"),
    [("sglang", "nobody", "nobody"), ("vllm", "glm45", "not installed in the worker")],
)
def test_a_missing_parser_is_a_configuration_error(
    engine: str, name: str, reason: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"engineArgs": {"toolCallParser": name}, "engine": engine}
    spec = make_job(tmp_path, **{f"rollout__{k}": v for k, v in changes.items()}).spec
    with pytest.raises(ConfigurationError, match=f"engineArgs.toolCallParser: .*{reason}"):
        parser_of(spec)
