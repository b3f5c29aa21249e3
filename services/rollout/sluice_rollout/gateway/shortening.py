"""Histories that are shorter than what a client sends: results of tools give way, the oldest first.

The client goes on with all of its history. What the model sees is shorter from there on, and a
branch of its own, which is trained as it was sampled. Each time half of the results that are left
give way, so that a long episode makes few branches. Results that the model has not answered yet
stay, as do all words of users and of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sluice.sample import Messages

DROPPED = "[dropped: the conversation was too long]"


@dataclass(slots=True)
class Shortener:
    """Results of one episode's tools that have given way, by the names of their calls."""

    dropped: set[str] = field(default_factory=set)

    def shorten(self, messages: Messages) -> Messages:
        """The messages without the results that have given way."""
        return [
            message | {"content": DROPPED} if self._is_dropped(message) else message
            for message in messages
        ]

    def drop(self, messages: Messages) -> int:
        """Let the older half of the results give way that are left of these messages. Returns how
        many do: 0 where there is nothing left.
        """
        left = list(self._droppable(messages))
        names = [_name(message) for message in left[: math.ceil(len(left) / 2)]]
        self.dropped.update(names)
        return len(names)

    def _droppable(self, messages: Messages) -> Iterator[dict[str, Any]]:
        answered = max(
            (at for at, message in enumerate(messages) if message["role"] == "assistant"), default=0
        )
        for message in messages[:answered]:
            is_result = message["role"] == "tool" and len(message["content"]) > len(DROPPED)
            if is_result and not self._is_dropped(message):
                yield message

    def _is_dropped(self, message: dict[str, Any]) -> bool:
        return message["role"] == "tool" and _name(message) in self.dropped


def _name(message: dict[str, Any]) -> str:
    """The call's name; of a result without one its content."""
    return str(message.get("tool_call_id") or message["content"])
