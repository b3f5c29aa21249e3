"""The text of a turn for a client that reads it while the engine generates it.

Only text that certainly begins the final answer is passed on. Held back are characters whose bytes
are incomplete, what may become a stop string, and everything from where a tool call may begin: a
call that cannot be parsed in the end is text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


# Tokens that are decoded again with new ones.
_CONTEXT_TOKENS = 16
_MOST_TOKENS = 512


@dataclass(slots=True)
class IncrementalDecoder:
    """Decodes tokens as they come, a few earlier ones again with each.

    A token's text may depend on the one before it (the space before a word), and a character may
    have several tokens.
    """

    decode: Callable[[list[int]], str]
    _window: list[int] = field(default_factory=list)
    _returned: int = 0  # characters of the window's text

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        self._window += tokens
        text = self.decode(self._window)
        # A model may generate bytes that never make up a character.
        complete = text if len(self._window) > _MOST_TOKENS else text.rstrip(_INCOMPLETE)
        new = complete[self._returned :]
        self._returned = max(self._returned, len(complete))
        if len(self._window) > 2 * _CONTEXT_TOKENS and complete == text:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._returned = len(self.decode(self._window))
        return new


@dataclass(slots=True)
class TurnStream:
    """The texts that a client gets while its turn is generated.

    Parameters
    ----------
    decoder
        Decodes the turn's tokens.
    stops
        Stop strings, which the final text does not have.
    call_start
        Text with which a tool call begins. None: there are no calls. Empty: a call may begin
        anywhere, so no text is certain before the end.
    special
        Tokens from which on no text is certain: they are in the text that calls are parsed from,
        and not in other texts.

    """

    decoder: IncrementalDecoder
    stops: Sequence[str] = ()
    call_start: str | None = None
    special: frozenset[int] = frozenset()
    prompt_tokens: int = 0
    sent: str = ""
    _held: str = ""
    _unread: str = ""
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    def add(self, tokens: Sequence[int]) -> None:
        """Decode tokens and pass on what is certain."""
        if not self.special.isdisjoint(tokens):
            self.call_start = ""
        self._held += self.decoder.add(tokens)
        length = certain_length(self._held, self.stops, self.call_start)
        self._pass_on(self._held[:length])
        self._held = self._held[length:]

    def finish(self, text: str, stop: str | None, *, has_calls: bool) -> str:
        """Pass on the rest of the final text, and return the text that the client has then.

        It is another text only if the tokenizer decodes parts differently from the whole, or if a
        parser changes the text before a call.
        """
        if not text.startswith(self.sent):
            rest = "" if has_calls else self._held.removesuffix(stop or "")
            text = self.sent + rest
        self._pass_on(text[len(self.sent) :])
        return text

    def close(self) -> None:
        """End `texts`."""
        self._closed = True
        self._news.set()

    async def texts(self) -> AsyncIterator[str]:
        """Yield the texts; those that come while the client is slow are joined."""
        while True:
            await self._news.wait()
            self._news.clear()
            text, self._unread = self._unread, ""
            if text:
                yield text
            if self._closed and not self._unread:
                return

    def _pass_on(self, text: str) -> None:
        if text:
            self.sent += text
            self._unread += text
            self._news.set()


def certain_length(text: str, stops: Sequence[str], call_start: str | None) -> int:
    """Return the length of the beginning of a text that later tokens cannot take back."""
    if call_start == "":
        return 0
    length = len(text) - max((_overlap(text, stop) for stop in stops), default=0)
    if call_start is not None:
        at = text.find(call_start)
        start = len(text) - _overlap(text, call_start) if at < 0 else at
        length = min(length, len(text[:start].rstrip()))  # a call takes the space before it away
    return length


def _overlap(text: str, word: str) -> int:
    """Return the length of the longest end of a text that begins a word."""
    longest = min(len(text), len(word))
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)
