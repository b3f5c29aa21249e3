"""vLLM 0.32, unmodified, from its official image, with a plugin of sluice in its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.engines.single_tensors import SingleTensors
from sluice.engines.vllm.launch import Launch

if TYPE_CHECKING:
    import aiohttp

    from sluice.engines.protocol import CallParser, Client, Control, Scorer


class Vllm:
    """The engine vLLM. Modules that speak HTTP are imported only when they are used."""

    def __init__(self) -> None:
        # vLLM's layerwise reload keeps the tensors of a layer until it has all of them.
        self.launch, self.layout = Launch(), SingleTensors(untied=("deepseek_v3", "glm4_moe"))

    def client(self, url: str) -> Client:
        from sluice.engines.vllm.client import Client

        return Client(url)

    def scorer(self, url: str, seconds: float) -> Scorer:
        from sluice.engines.vllm.score import Scorer

        return Scorer(url, seconds)

    def call_parser(self, name: str) -> CallParser:
        """Raise ImportError: vLLM's parsers need its server's request and tokenizer."""
        raise ImportError("vLLM's parsers of tool calls run inside its server only")

    def control(
        self, address: str, session: aiohttp.ClientSession, timeout: float, source: str
    ) -> Control:
        from sluice.engines.vllm.control import Control

        return Control(address, session, timeout, source)

    def session(self) -> aiohttp.ClientSession:
        from sluice.engines.http import connections

        return connections.session(limit=0)  # aiohttp's 100 would make engines wait for each other
