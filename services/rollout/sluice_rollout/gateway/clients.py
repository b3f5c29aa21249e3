"""Clients of other projects for an episode's endpoint, as cheap as they can be had.

Made plainly, OpenAI's client reads the machine's certificates: 20 ms of a core, for an address
without TLS. One client for all episodes costs as much: httpx looks through all its connections at
each request, 5 ms of a core and more with 256 of them (benchmarks/agents.py).
"""

from __future__ import annotations

import ssl
from functools import cache

from openai import AsyncOpenAI, DefaultAsyncHttpxClient


def openai_client(base_url: str, api_key: str) -> AsyncOpenAI:
    """A client with connections of its own and certificates that are read once."""
    http = DefaultAsyncHttpxClient(verify=certificates())
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http)


@cache
def certificates() -> ssl.SSLContext:
    """The machine's. An episode's address needs none, and a client cannot be made without."""
    return ssl.create_default_context()
