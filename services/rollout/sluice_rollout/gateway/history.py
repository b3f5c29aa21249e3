"""Finds the tokens that a request's messages continue.

The gateway identifies a history by a digest of its messages. If the chat template renders an
answered history the same with and without the new messages after it, the tokens of that turn are
kept and only the new text is encoded. (verl and SkyRL do so with a fixed base history; here it is
the real one.) Some templates render an old history differently, for example without earlier
thoughts. Then an earlier turn is tried. The last resort is to encode the whole text, and to keep
the tokens that it has in common with a turn.

Pure, except for the template.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sluice.data import chat
from sluice.data.chat import PromptError
from sluice.images.image import referred
from sluice.samples.sample import Messages
from sluice_rollout.gateway.conversation import Conversation, Turn
from sluice_rollout.gateway.large_requests import LARGE_CHARACTERS

_MARK = "%sluice-answer%"
_THOUGHT = "</think>"
Tools = list[dict[str, Any]] | None


class TextTooLongError(PromptError):
    """A text that is longer than the context, whatever its tokens are.

    `tokens` is a lower bound of their number.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(f"a text of at least {tokens} tokens")
        self.tokens = tokens


@dataclass
class Template:
    """A model's chat template and tokenizer."""

    tokenizer: Any
    arguments: dict[str, Any] | None = None  # further variables of the template
    context: int | None = None  # tokens of the model's context; longer texts are not encoded
    placeholder: int | None = None  # token that stands for an image; None: the model gets none

    def text(self, messages: Messages, tools: Tools, *, opened: bool) -> str:
        """Render messages, and the beginning of an answer if `opened`. Raises PromptError."""
        return chat.render(
            self.tokenizer,
            messages,
            chat=True,
            tools=tools,
            arguments=self.arguments,
            opened=opened,
        )

    def encode(self, text: str, *, opening: bool = False) -> list[int]:
        """Encode a text.

        Parameters
        ----------
        text
            The text.
        opening
            Add the tokenizer's special tokens, for a text that does not come from a template.

        Raises
        ------
        TextTooLongError
            The text cannot fit the context. This is found before a large text is encoded.
        PromptError
            The text is not valid Unicode.

        """
        if self.context is not None and (least := self._least_tokens(text)) > self.context:
            raise TextTooLongError(least)
        try:
            return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=opening)]
        except (TypeError, ValueError) as error:  # not valid Unicode
            raise PromptError(f"the text cannot be encoded: {error}") from error

    def _least_tokens(self, text: str) -> int:
        """Return a lower bound of a large text's tokens; 0 for a small text."""
        longest = self._longest_token if len(text) >= LARGE_CHARACTERS else None
        return -(-len(text.encode(errors="replace")) // longest) if longest else 0

    @cached_property
    def _longest_token(self) -> int | None:
        """Bytes of the longest token; None if one token may stand for any unknown text."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        falls_back = getattr(getattr(backend, "model", None), "byte_fallback", False)
        if self.tokenizer.unk_token is not None and not falls_back:
            return None
        return max((len(token.encode()) for token in self.tokenizer.get_vocab()), default=None)

    @cached_property
    def tail(self) -> str:
        """The text that ends a turn, after its answer."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        return self.text(messages, None, opened=False).rpartition(_MARK)[2]

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens."""
        return frozenset(self.tokenizer.all_special_ids)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The turn that a request continues, and the tokens that it adds."""

    parent: Turn | None
    added: list[int]  # tokens after the parent's
    images: tuple[str, ...] = ()  # digests of the images that `added` has placeholders of
    rerendered: int = 0  # tokens of `added` that encode earlier answers anew
    least_tokens: int = 0  # a lower bound of the tokens of a request that cannot fit; else 0


@dataclass(slots=True)
class History:
    """Answers that the gateway has given in one conversation, by the history that they end."""

    conversation: Conversation
    template: Template
    # The turn that ends a history, and the turn's text, by the history's digest.
    answers: dict[bytes, tuple[Turn, str]] = field(default_factory=dict)

    def remember(self, messages: Messages, tools: Tools, turn: Turn, text: str) -> None:
        """Remember a turn whose answer is the last of these messages."""
        self.answers[digests(messages, tools)[-1]] = turn, text

    def continue_messages(self, messages: Messages, tools: Tools) -> Continuation:
        """Find the turn that messages continue. Raises PromptError."""
        full, images = self.template.text(messages, tools, opened=True), referred(messages)
        for count, digest in reversed(list(enumerate(digests(messages, tools), 1))):
            if digest in self.answers:
                turn, answer = self.answers[digest]
                prefix = self.template.text(messages[:count], tools, opened=False)
                if self._is_unchanged(prefix, full, answer):
                    added = self._tokens_after(turn, full[len(prefix) :])
                    new = self._images_in(added, images[len(turn.all_images) :])
                    rerendered = len(added) * (_answers(messages[count:]) > 0)
                    return Continuation(turn, added, new, rerendered)
        return self.continue_tokens(self.template.encode(full), images, _answers(messages))

    def continue_tokens(
        self, ids: list[int], images: Sequence[str] = (), answers: int = 0
    ) -> Continuation:
        """Find the longest turn that is a prefix of these tokens. Raises PromptError.

        `images` are the digests of their images, and `answers` is the number of the assistant's
        messages in them.
        """
        parent = self.conversation.longest_continued(ids, images)
        added = ids[len(parent.all_tokens) :] if parent else ids
        new = self._images_in(added, images[len(parent.all_images) :] if parent else images)
        kept = len(parent.path) if parent else 0
        return Continuation(parent, added, new, len(added) * bool(self.answers and answers > kept))

    def continue_text(self, turn: Turn, text: str) -> Continuation:
        """Continue a turn with a text. Raises PromptError."""
        added = self.template.encode(text)
        return Continuation(turn, added, self._images_in(added, ()))

    def _images_in(self, added: list[int], images: Sequence[str]) -> tuple[str, ...]:
        """Return the images of new tokens. Raises PromptError unless each has a placeholder."""
        placeholder = self.template.placeholder
        count = 0 if placeholder is None else added.count(placeholder)
        if count != len(images):
            name = self.template.tokenizer.convert_ids_to_tokens(placeholder)
            raise PromptError(
                f"the request has {count} placeholders {name} for {len(images)} new images: "
                "expected a chat template that writes one for each image, and none in texts"
            )
        return tuple(images)

    def _is_unchanged(self, prefix: str, full: str, answer: str) -> bool:
        """True if the template renders an answered history as it was generated.

        `full` must begin with the history's text `prefix`, and that must contain the thoughts of
        the last answer.
        """
        thought = answer.rpartition(_THOUGHT)[0].removeprefix("<think>").strip()
        ends = prefix.endswith(self.template.tail)
        return full.startswith(prefix) and ends and thought in prefix

    def _tokens_after(self, turn: Turn, new: str) -> list[int]:
        """Encode the text after a turn, without the turn's end if the model has generated that."""
        ids, special = self.template.encode(self.template.tail + new), self.template.special
        last = int(turn.tokens[-1]) if len(turn.tokens) else -1
        if self.template.tail and ids and (ids[0] == last or {ids[0], last} <= special):
            return ids[1:]
        return ids


def _answers(messages: Messages) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def digests(messages: Messages, tools: Tools) -> list[bytes]:
    """Digest the tools and all messages up to each message."""
    state = hashlib.sha256(json.dumps(tools, sort_keys=True).encode())
    chain = []
    for message in messages:
        state.update(json.dumps(message, sort_keys=True).encode())
        chain.append(state.digest())
    return chain
