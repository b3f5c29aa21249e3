"""verl.experimental.agent_loop.tool_parser: tool calls in what the model has written."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class FunctionCall(BaseModel):
    """A call. arguments: JSON."""

    name: str
    arguments: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """A format of tool calls, by its name."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end a turn behind a call."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text without its calls, and the calls."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """The parser of this name. Raises ValueError."""
        if name not in cls._registry:
            known = ", ".join(sorted(cls._registry))
            raise ValueError(
                f"multi_turn.format: {name!r}; expected {known}, or a parser that the function's "
                "file registers (ToolParser.register)"
            )
        return cls._registry[name](tokenizer)

    @classmethod
    def register(cls, name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
        """Decorates a parser, which then has this name."""

        def add(parser: type[ToolParser]) -> type[ToolParser]:
            cls._registry[name] = parser
            return parser

        return add


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """Calls as Hermes and Qwen write them. One that is no JSON is left out."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        text: str = self.tokenizer.decode(responses_ids)
        calls = [call for call in map(_call, _HERMES.findall(text)) if call]
        return (_HERMES.sub("", text) if calls else text), calls


def _call(text: str) -> FunctionCall | None:
    try:
        value = json.loads(text)
        return FunctionCall(name=value["name"], arguments=json.dumps(value["arguments"]))
    except (ValueError, KeyError, TypeError):
        return None
