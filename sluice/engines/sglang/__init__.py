"""SGLang, unmodified, from its official image.

A plugin of sluice runs in its processes unless the job forbids it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.engines.sglang.launch import Launch
from sluice.engines.sglang.layout import Layout

if TYPE_CHECKING:
    import aiohttp

    from sluice.engines.protocol import CallParser, Client, Control, Scorer


class Sglang:
    """The engine SGLang.

    Modules that speak HTTP are imported only when they are used: the operator never calls an
    engine.
    """

    def __init__(self) -> None:
        self.launch, self.layout = Launch(), Layout()

    def client(self, url: str) -> Client:
        from sluice.engines.sglang.client import Client

        return Client(url)

    def scorer(self, url: str, seconds: float) -> Scorer:
        from sluice.engines.sglang.score import Scorer

        return Scorer(url, seconds)

    def call_parser(self, name: str) -> CallParser:
        from sluice.engines.sglang import tool_calls

        return tool_calls.parser(name)

    def control(
        self, address: str, session: aiohttp.ClientSession, timeout: float, source: str
    ) -> Control:
        from sluice.engines.sglang.control import Control

        return Control(address, session, timeout, source)

    def session(self) -> aiohttp.ClientSession:
        from sluice.engines.http import connections

        return connections.session(limit=0)  # aiohttp's 100 would make engines wait for each other
