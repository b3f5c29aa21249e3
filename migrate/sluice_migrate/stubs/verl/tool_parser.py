"""verl.experimental.agent_loop.tool_parser: parsers of tool calls in responses."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class FunctionCall(BaseModel):
    """A call; the arguments are JSON text."""

    name: str
    arguments: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """Base class of parsers, each for a format of tool calls."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids of tokens that end a turn after a call."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the text without its calls, and the calls."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """Return the parser of this name. Raises ValueError."""
        if name not in cls._registry:
            names = ", ".join(sorted(cls._registry))
            raise ValueError(
                f"multi_turn.format: {name!r}; expected {names}, or a parser that the function's "
                "file registers (ToolParser.register)"
            )
        return cls._registry[name](tokenizer)

    @classmethod
    def register(cls, name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
        """Decorate a parser to register it under a name."""

        def add(parser: type[ToolParser]) -> type[ToolParser]:
            cls._registry[name] = parser
            return parser

        return add


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """Parses calls as Hermes and Qwen write them; calls that are not valid JSON are dropped."""

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
