"""SGLang's parsers of tool calls, by their names."""

from __future__ import annotations

import re
from typing import Any

from sluice.engines.protocol import CallParser

_ASSISTANT = "<|start|>assistant"
# Parsers of SGLang that find calls by one marker alone.
_MARKED = {"qwen3_coder", "glm45", "glm47", "deepseekv3", "deepseekv31", "kimi_k2"}
_NAME_FIRST = re.compile(r"\s*(to=[\w.-]+)\s*<\|channel\|>commentary")


def parser(name: str) -> CallParser:
    """Return the parser of this name.

    Raises ImportError if SGLang is not installed in this environment, and ValueError if it has no
    such parser.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    detector = FunctionCallParser([], name).detector

    def parse(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        call_parser = FunctionCallParser([Tool.model_validate(tool) for tool in tools], name)
        turn = harmony(text) if name == "gpt-oss" else text
        if not call_parser.has_tool_call(turn):
            return text, []
        rest, calls = call_parser.parse_non_stream(turn)
        return rest, [(call.name or "", call.parameters) for call in calls]

    start = getattr(detector, "tool_call_start_token", "") or detector.bot_token
    return CallParser(parse, start.strip() if name in _MARKED else "")


def harmony(text: str) -> str:
    """Return a turn of gpt-oss as SGLang's parser expects it.

    It begins with the role that the prompt opens, has the tool's name after the channel's (the
    model writes either order), and ends with the end of a call, which is the end of the turn.
    """
    whole = text if text.startswith(_ASSISTANT) else _ASSISTANT + text
    whole = _NAME_FIRST.sub(r"<|channel|>commentary \1", whole)
    header = whole.rpartition("<|channel|>")[2].partition("<|message|>")[0]
    is_call = " to=" in header
    return whole + "<|call|>" if is_call and not whole.endswith("<|call|>") else whole
