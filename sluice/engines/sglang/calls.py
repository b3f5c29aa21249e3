"""SGLang's own parsers of tool calls, by their names."""

from __future__ import annotations

from typing import Any

from sluice.engines.base import CallParser


def parser(name: str) -> CallParser:
    """The parser of this name.

    Raises ImportError where SGLang is not installed beside the worker, and ValueError where it
    knows no such parser.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    FunctionCallParser([], name)

    def parse(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        own = FunctionCallParser([Tool.model_validate(tool) for tool in tools], name)
        if not own.has_tool_call(text):
            return text, []
        rest, calls = own.parse_non_stream(text)
        return rest, [(call.name or "", call.parameters) for call in calls]

    return parse
