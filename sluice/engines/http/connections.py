"""HTTP to an engine's server: connections are used again, and a closed one costs nobody a request.

Servers (uvicorn) close connections that were idle for 5 s. A client that was held up for so long
has not noticed when it sends the next request on one, and cannot tell that from a server that has
died.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

KEEP_ALIVE_SECONDS = 2.0
"""Idle connections are given up before the server does it."""


def session(**options: Any) -> aiohttp.ClientSession:
    """A client for engines. options: aiohttp.TCPConnector's."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_SECONDS, **options)
    )


@asynccontextmanager
async def request(
    client: aiohttp.ClientSession, method: str, url: str, **options: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """As `client.request`, and again if the connection ended before the first byte of an answer.

    A server that has died refuses the second time, so a request reaches a handler that answers at
    most once. A handler whose answer was lost may see it twice. Raises what aiohttp raises.
    """
    try:
        answer = await client.request(method, url, **options)
    except aiohttp.ClientError as error:
        if not has_ended(error):
            raise
        answer = await client.request(method, url, **options)
    async with answer:
        yield answer


def has_ended(error: BaseException) -> bool:
    """True where a connection that was there ended before an answer came."""
    ended = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    return ended and not isinstance(error, aiohttp.ClientConnectorError)
