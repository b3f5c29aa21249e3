"""Compaction: shorter histories than a client sends, because the model's context is full.

The client goes on with its whole history. What the model sees is shorter from then on, and a branch
of the conversation, which is trained as it was sampled.

`ToolResultDropper` drops results of tools, the oldest first. It drops half of the remaining results
at a time, so that a long episode makes few branches. It keeps results that the model has not
answered yet, and all texts of users and of the model. A result is identified by the whole history
that ends with it, because some clients number the calls of each turn anew.

`Summaries` replaces a history by the model's summary of it. The model then sees the system prompt,
the user's last message followed by the summary, and calls whose results it has not read yet. A
summary is a turn like any other, and is trained. (ReSum, Wu et al. 2025, arXiv:2509.13313, and
SUPO, Lu et al. 2025, arXiv:2510.06727, train a model to work so.)

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sluice.samples.sample import Messages
from sluice_rollout.gateway.history import Tools, digests

DROPPED = "[dropped: the conversation was too long]"
INTRODUCTION = "Summary of the conversation so far:"
_THOUGHT = "</think>"


@dataclass(slots=True)
class ToolResultDropper:
    """Drops results of tools from the histories of one agent."""

    dropped: set[bytes] = field(default_factory=set)  # digests of the histories that end with them

    def shorten(self, messages: Messages) -> Messages:
        """Replace the contents of dropped results."""
        if not self.dropped:
            return messages
        return [
            message | {"content": DROPPED} if digest in self.dropped else message
            for message, digest in zip(messages, digests(messages, None), strict=True)
        ]

    def drop(self, messages: Messages) -> int:
        """Drop the older half of the results that are left. Returns their number."""
        remaining = list(self._droppable(messages))
        older = remaining[: math.ceil(len(remaining) / 2)]
        self.dropped.update(older)
        return len(older)

    def _droppable(self, messages: Messages) -> Iterator[bytes]:
        """Yield the digests of results that may be dropped, oldest first."""
        answered = max(
            (at for at, message in enumerate(messages) if message["role"] == "assistant"), default=0
        )
        for message, digest in zip(messages[:answered], digests(messages, None), strict=False):
            content = message["content"]
            is_long = isinstance(content, list) or len(content) > len(DROPPED)
            if message["role"] == "tool" and is_long and digest not in self.dropped:
                yield digest


@dataclass(slots=True)
class Summaries:
    """Replaces histories of one agent by summaries."""

    # Messages that replace a history, by the history's digest.
    replacements: dict[bytes, Messages] = field(default_factory=dict)

    def shorten(self, messages: Messages, tools: Tools) -> Messages:
        """Replace the longest summarised history that the messages begin with."""
        if not self.replacements:
            return messages
        for count, digest in reversed(list(enumerate(digests(messages, tools), 1))):
            if digest in self.replacements:
                return [*self.replacements[digest], *messages[count:]]
        return messages

    def replace(self, messages: Messages, tools: Tools, summary: str) -> None:
        """Replace these messages by a summary from now on."""
        self.replacements[digests(messages, tools)[-1]] = after_summary(messages, summary)


def summary_request(messages: Messages, prompt: str) -> Messages | None:
    """Ask for a summary of the messages up to the model's last answer.

    Later messages may not fit the context, so they are left out, and results of that answer's calls
    are dropped. Returns None if the model has not answered yet.
    """
    answered = _last(messages, "assistant")
    if answered is None:
        return None
    results = [
        message | {"content": DROPPED}
        for message in messages[answered + 1 :]
        if message["role"] == "tool"
    ]
    return [*messages[: answered + 1], *results, {"role": "user", "content": prompt}]


def after_summary(messages: Messages, summary: str) -> Messages:
    """Return the messages that replace these ones, given their summary."""
    system = [message for message in messages if message["role"] == "system"]
    question, answered = _last(messages, "user"), _last(messages, "assistant")
    content = _with_text(
        messages[question]["content"] if question is not None else "", f"{INTRODUCTION}\n{summary}"
    )
    unread = messages[answered:] if answered is not None and messages[-1]["role"] == "tool" else []
    return [*system, {"role": "user", "content": content}, *unread]


def _with_text(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """Append a text to a content, which may have images."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": f"\n\n{text}"}]
    return f"{content}\n\n{text}" if content else text


def summary_text(answer: str) -> str:
    """Return the summary in an answer, without the thoughts before it."""
    return answer.rpartition(_THOUGHT)[2].strip()


def _last(messages: Messages, role: str) -> int | None:
    places = [at for at, message in enumerate(messages) if message["role"] == role]
    return places[-1] if places else None
