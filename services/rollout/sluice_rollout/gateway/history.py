"""From a request's messages to the tokens that the engine is asked to go on from.

Messages that the gateway has answered are known by a digest of all messages up to them. Where the
chat template writes them, with what is new behind them, as it would have without, the tokens of
that turn are kept and only what is new is encoded. (The base of verl's and SkyRL's incremental
templates, with the real history in place of a fixed one.) Where the template writes them otherwise,
as those that drop earlier thoughts do, an earlier turn is tried; the last resort is to encode the
whole text, and to keep what tokens it has in common with a turn.

Pure, but for the template.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sluice.data import chat
from sluice.data.chat import PromptError
from sluice.samples.sample import Messages
from sluice_rollout.gateway.conversation import Conversation, Turn
from sluice_rollout.gateway.large import LARGE

_MARK = "%sluice-answer%"
_THOUGHT = "</think>"
Tools = list[dict[str, Any]] | None


class TextTooLongError(PromptError):
    """A text has more tokens than the context, as its length alone says.

    tokens: how many it has at least.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(f"a text of at least {tokens} tokens")
        self.tokens = tokens


@dataclass
class Template:
    """A model's chat template and tokenizer.

    arguments: further variables of the template. context: tokens of the model's context; no text
    of more is encoded.
    """

    tokenizer: Any
    arguments: dict[str, Any] | None = None
    context: int | None = None

    def text(self, messages: Messages, tools: Tools, *, opened: bool) -> str:
        """Raises PromptError where the template refuses the messages."""
        return chat.render(
            self.tokenizer,
            messages,
            chat=True,
            tools=tools,
            arguments=self.arguments,
            opened=opened,
        )

    def encode(self, text: str, *, opening: bool = False) -> list[int]:
        """Token ids; with the tokenizer's own special ones where a text opens without a template.

        Raises PromptError, TextTooLongError before a large text is encoded.
        """
        if self.context is not None and (least := self._least_tokens(text)) > self.context:
            raise TextTooLongError(least)
        try:
            return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=opening)]
        except (TypeError, ValueError) as error:  # a text that is no Unicode
            raise PromptError(f"the text cannot be encoded: {error}") from error

    def _least_tokens(self, text: str) -> int:
        """A lower bound of a large text's tokens; 0 for a small text, which is soon encoded."""
        longest = self._longest_token if len(text) >= LARGE else None
        return -(-len(text.encode(errors="replace")) // longest) if longest else 0

    @cached_property
    def _longest_token(self) -> int | None:
        """Bytes of the vocabulary's longest token; None if a token may be any unknown text."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        falls_back = getattr(getattr(backend, "model", None), "byte_fallback", False)
        if self.tokenizer.unk_token is not None and not falls_back:
            return None
        return max((len(token.encode()) for token in self.tokenizer.get_vocab()), default=None)

    @cached_property
    def tail(self) -> str:
        """The text behind an answer, the end of its turn."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        return self.text(messages, None, opened=False).rpartition(_MARK)[2]

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of tokens that are no text."""
        return frozenset(self.tokenizer.all_special_ids)


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a request goes on.

    added: tokens behind the parent's. rerendered: how many of them are of messages that have been
    tokens before. least: set if the request is too long for any place; it has at least so many
    tokens.
    """

    parent: Turn | None
    added: list[int]
    rerendered: int = 0
    least: int = 0


@dataclass(slots=True)
class History:
    """The answers that the gateway has given in one episode, by the messages before them."""

    conversation: Conversation
    template: Template
    answers: dict[bytes, tuple[Turn, str]] = field(default_factory=dict)
    """The turn that ends a history, and its text, by the history's digest."""

    def note(self, messages: Messages, tools: Tools, turn: Turn, text: str) -> None:
        """Remember a turn whose answer is the last of these messages."""
        self.answers[digests(messages, tools)[-1]] = turn, text

    def place(self, messages: Messages, tools: Tools) -> Place:
        """The place where these messages go on. Raises PromptError."""
        full = self.template.text(messages, tools, opened=True)
        for count, digest in reversed(list(enumerate(digests(messages, tools), 1))):
            if digest in self.answers:
                turn, answer = self.answers[digest]
                known = self.template.text(messages[:count], tools, opened=False)
                if self._is_kept(known, full, answer):
                    added = self._behind(turn, full[len(known) :])
                    return Place(turn, added, len(added) * (_answers(messages[count:]) > 0))
        return self.fresh(self.template.encode(full), _answers(messages))

    def fresh(self, ids: list[int], answers: int = 0) -> Place:
        """The place where these tokens go on, which are not known to continue any turn.

        answers: how many they hold that an assistant has given.
        """
        parent = self.conversation.continued(ids)
        added = ids[len(parent.whole) :] if parent else ids
        kept = len(parent.path) if parent else 0
        return Place(parent, added, len(added) * bool(self.answers and answers > kept))

    def _is_kept(self, known: str, full: str, answer: str) -> bool:
        """True where the template writes a known history alike with and without what follows, and
        leaves out no thought of its last answer.
        """
        thought = answer.rpartition(_THOUGHT)[0].removeprefix("<think>").strip()
        return full.startswith(known) and known.endswith(self.template.tail) and thought in known

    def _behind(self, turn: Turn, new: str) -> list[int]:
        """The tokens behind a turn. What ends it is not written where the model has."""
        ids, special = self.template.encode(self.template.tail + new), self.template.special
        last = int(turn.tokens[-1]) if len(turn.tokens) else -1
        if self.template.tail and ids and (ids[0] == last or {ids[0], last} <= special):
            return ids[1:]
        return ids


def _answers(messages: Messages) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def digests(messages: Messages, tools: Tools) -> list[bytes]:
    """A digest of the tools and all messages up to each of them."""
    state = hashlib.sha256(json.dumps(tools, sort_keys=True).encode())
    chain = []
    for message in messages:
        state.update(json.dumps(message, sort_keys=True).encode())
        chain.append(state.digest())
    return chain
