"""What the streams of all interfaces have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from sluice_rollout.gateway.interfaces.errors import GatewayError
from sluice_rollout.gateway.interfaces.exchange import Answer

Event = dict[str, Any]


class AnswerEvents(Protocol):
    """The events of one streamed answer, in the order of the calls."""

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        """Yield what comes before the answer."""

    def text(self, text: str) -> Iterator[Event]:
        """Yield a part of the answer's text."""

    def end(self, answer: Answer) -> Iterator[Event]:
        """Yield what follows the text: tool calls, the reason for the end, usage."""

    def fail(self, error: GatewayError) -> Iterator[Event]:
        """Yield an error after which nothing comes."""
