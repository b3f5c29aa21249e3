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

from sluice.samples.sample import Messages
from sluice_rollout.gateway.history import Tools, digests

DROPPED = "[dropped: the conversation was too long]"
INTRODUCTION = "Summary of the conversation so far:"
_THOUGHT = "</think>"


@dataclass(slots=True)
class ToolResultDropper:
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


@dataclass(slots=True)
class Summaries:
    """Histories of one seat that were summarised, and what is seen in their place, by digest."""

    replacements: dict[bytes, Messages] = field(default_factory=dict)

    def shorten(self, messages: Messages, tools: Tools) -> Messages:
        """The messages, with the longest history among them that was summarised left out."""
        if not self.replacements:
            return messages
        for count, digest in reversed(list(enumerate(digests(messages, tools), 1))):
            if digest in self.replacements:
                return [*self.replacements[digest], *messages[count:]]
        return messages

    def replace(self, messages: Messages, tools: Tools, summary: str) -> None:
        """Let a summary take the place of these messages."""
        self.replacements[digests(messages, tools)[-1]] = after_summary(messages, summary)


def summary_request(messages: Messages, prompt: str) -> Messages | None:
    """The request for a summary of these messages; None where the model has said nothing yet.

    It is asked behind its last answer: what has come since need not fit. Results of calls of that
    answer are left out.
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
    """The messages that take the place of these, of which this is the summary."""
    system = [message for message in messages if message["role"] == "system"]
    asked, answered = _last(messages, "user"), _last(messages, "assistant")
    last = [messages[asked]["content"]] if asked is not None else []
    told = "\n\n".join([*last, f"{INTRODUCTION}\n{summary}"])
    unread = messages[answered:] if answered is not None and messages[-1]["role"] == "tool" else []
    return [*system, {"role": "user", "content": told}, *unread]


def summary_text(answer: str) -> str:
    """The summary in an answer, without the thoughts before it."""
    return answer.rpartition(_THOUGHT)[2].strip()


def _last(messages: Messages, role: str) -> int | None:
    places = [at for at, message in enumerate(messages) if message["role"] == role]
    return places[-1] if places else None
