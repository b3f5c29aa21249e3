"""Histories that are shorter than what a client sends: results of tools give way, the oldest first.

The client goes on with all of its history. What the model sees is shorter from there on, and a
branch of its own, which is trained as it was sampled. Each time half of the results that are left
give way, so that a long episode makes few branches. Results that the model has not answered yet
stay, as do all words of users and of the model.

A result is known by the whole history that ends with it. The name of its call is not enough: some
clients number the calls of each turn anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from sluice.samples.sample import Messages
from sluice_rollout.gateway.history import digests

DROPPED = "[dropped: the conversation was too long]"


@dataclass(slots=True)
class Shortener:
    """Results of one episode's tools that have given way, by the digest of their history."""

    dropped: set[bytes] = field(default_factory=set)

    def shorten(self, messages: Messages) -> Messages:
        """The messages without the results that have given way."""
        if not self.dropped:
            return messages
        return [
            message | {"content": DROPPED} if digest in self.dropped else message
            for message, digest in zip(messages, digests(messages, None), strict=True)
        ]

    def drop(self, messages: Messages) -> int:
        """Let the older half of the results give way that are left of these messages. Returns how
        many do: 0 where there is nothing left.
        """
        left = list(self._droppable(messages))
        older = left[: math.ceil(len(left) / 2)]
        self.dropped.update(older)
        return len(older)

    def _droppable(self, messages: Messages) -> Iterator[bytes]:
        """Digests of the results that may give way, oldest first."""
        answered = max(
            (at for at, message in enumerate(messages) if message["role"] == "assistant"), default=0
        )
        for message, digest in zip(messages[:answered], digests(messages, None), strict=False):
            is_result = message["role"] == "tool" and len(message["content"]) > len(DROPPED)
            if is_result and digest not in self.dropped:
                yield digest
