"""Histories that are shorter than what a client sends: the model has summarised them itself.

The client goes on with all of its history. What the model sees in place of a history that was
summarised is the system prompt, the last message of the user with the summary behind it, and calls
whose results it has not read yet. From there on it is a branch of its own. A summary is a turn like
any other, and is trained. (ReSum, Wu et al. 2025, arXiv:2509.13313, and SUPO, Lu et al. 2025,
arXiv:2510.06727, train a model to work so.)

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.samples.sample import Messages
from sluice_rollout.gateway.history import Tools, digests
from sluice_rollout.gateway.shortening import DROPPED

INTRODUCTION = "Summary of the conversation so far:"
_THOUGHT = "</think>"


@dataclass(slots=True)
class Summaries:
    """Histories of one seat that were summarised, and what is seen in their place, by digest."""

    seen: dict[bytes, Messages] = field(default_factory=dict)

    def shorten(self, messages: Messages, tools: Tools) -> Messages:
        """The messages, with the longest history among them that was summarised left out."""
        if not self.seen:
            return messages
        for count, digest in reversed(list(enumerate(digests(messages, tools), 1))):
            if digest in self.seen:
                return [*self.seen[digest], *messages[count:]]
        return messages

    def note(self, messages: Messages, tools: Tools, summary: str) -> None:
        """Let a summary take the place of these messages."""
        self.seen[digests(messages, tools)[-1]] = resumed(messages, summary)


def question(messages: Messages, prompt: str) -> Messages | None:
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


def resumed(messages: Messages, summary: str) -> Messages:
    """The messages that take the place of these, of which this is the summary."""
    system = [message for message in messages if message["role"] == "system"]
    asked, answered = _last(messages, "user"), _last(messages, "assistant")
    last = [messages[asked]["content"]] if asked is not None else []
    told = "\n\n".join([*last, f"{INTRODUCTION}\n{summary}"])
    unread = messages[answered:] if answered is not None and messages[-1]["role"] == "tool" else []
    return [*system, {"role": "user", "content": told}, *unread]


def text_of(answer: str) -> str:
    """The summary in an answer, without the thoughts before it."""
    return answer.rpartition(_THOUGHT)[2].strip()


def _last(messages: Messages, role: str) -> int | None:
    places = [at for at, message in enumerate(messages) if message["role"] == role]
    return places[-1] if places else None
