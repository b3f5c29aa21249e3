"""transformers: a plain server for any model that transformers has, for tests and debugging.

It is the smallest example of an engine. It has no prefix cache, no special kernels and no
parallelism: it computes what the model's code in transformers computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.engines.single_tensors import SingleTensors
from sluice.engines.transformers.launch import Launch

if TYPE_CHECKING:
    import aiohttp

    from sluice.engines.protocol import CallParser, Client, Control, Scorer


class Transformers:
    """The engine transformers. Modules that speak HTTP are imported only when they are used."""

    def __init__(self) -> None:
        self.launch, self.layout = Launch(), SingleTensors()

    def client(self, url: str) -> Client:
        from sluice.engines.transformers.client import Client

        return Client(url)

    def scorer(self, url: str, seconds: float) -> Scorer:
        from sluice.engines.transformers.score import Scorer

        return Scorer(url, seconds)

    def call_parser(self, name: str) -> CallParser:
        """Raise ImportError: transformers has no parsers of tool calls."""
        raise ImportError("rollout.engine: transformers has no parsers of tool calls")

    def control(
        self, address: str, session: aiohttp.ClientSession, timeout: float, source: str
    ) -> Control:
        from sluice.engines.transformers.control import Control

        return Control(address, session, timeout, source)

    def session(self) -> aiohttp.ClientSession:
        from sluice.engines.http import connections

        return connections.session(limit=0)  # aiohttp's 100 would make engines wait for each other
