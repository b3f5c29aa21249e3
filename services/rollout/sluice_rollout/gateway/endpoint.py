"""The gateway from an episode's point of view: an address, a key, and the sample behind them."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class Gateway:
    """An OpenAI-compatible endpoint for one episode. A program with its address and key plays it.

        async with gateway.openai() as client:
            await client.chat.completions.create(...)

    Parameters
    ----------
    base_url, api_key
        What a program needs to ask the model.
    close
        Ends the key and writes the program's turns into the sample. The argument is True if the
        episode was interrupted: turns that no client has received are then kept as well.
    claim_sample
        Takes the tokens of prompt and response, and the loss mask of the response. They become the
        sample, instead of the longest branch. Raises ClaimError.
    is_full
        Returns True if the last request was refused because it did not fit the context.
    reward_turn
        Adds a value to the reward of a seat's turn, by the turn's index. Raises IndexError.

    """

    base_url: str
    api_key: str
    close: Callable[[bool], None]
    claim_sample: Callable[[Sequence[int], Sequence[int]], None]
    is_full: Callable[[], bool]
    reward_turn: Callable[[float, str, int], None]

    def openai(self) -> AsyncOpenAI:
        """Make OpenAI's client for this episode, at less cost than `AsyncOpenAI(...)`.

        Raises ImportError if the worker does not have the package `openai`.
        """
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # A client that all episodes share would be slower: httpx looks through all its connections
        # at each request, 5 ms of a core or more with 256 of them (benchmarks/agents.py).
        http = DefaultAsyncHttpxClient(verify=certificates())
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    @property
    def router(self) -> tuple[str, int]:
        """Host and port of a SGLang-compatible `/generate`. The host contains the key."""
        address = urlsplit(self.base_url)
        return f"{self.api_key}@{address.hostname}", address.port or 0


@cache
def certificates() -> ssl.SSLContext:
    """The machine's certificates, read once.

    Reading them takes 20 ms of a core. The gateway does not use TLS, but OpenAI's client reads them
    whenever it is made without a context.
    """
    return ssl.create_default_context()
