"""The gateway as an episode has it: an address, a key, and what becomes of the turns there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class Gateway:
    """An OpenAI-compatible endpoint for one episode: a program that is given these two plays it.

        async with gateway.openai() as client:
            await client.chat.completions.create(...)

    close: ends the key, and puts the program's turns into the sample; with True, all that another
    play can go on from. keep(tokens, mask): says which tokens of prompt and
    response are the sample, and which of the response are trained, in place of the longest branch;
    raises ClaimError. full: True where the last request was refused, because it did not fit.
    reward_turn: adds a value to the reward of a seat's turn, by its place; raises IndexError.
    """

    base_url: str
    api_key: str
    close: Callable[[bool], None]
    keep: Callable[[Sequence[int], Sequence[int]], None]
    full: Callable[[], bool]
    reward_turn: Callable[[float, str, int], None]

    def openai(self) -> AsyncOpenAI:
        """OpenAI's client for this episode, as `AsyncOpenAI(base_url=..., api_key=...)` is, but
        that certificates are read once. Raises ImportError where the worker has no `openai`.
        """
        from sluice_rollout.gateway.clients import openai_client

        return openai_client(self.base_url, self.api_key)

    @property
    def router(self) -> tuple[str, int]:
        """Host, with the key before it, and port of an address where `/generate` is asked as
        SGLang's is.
        """
        address = urlsplit(self.base_url)
        return f"{self.api_key}@{address.hostname}", address.port or 0
