"""HTTP connections to an engine's server, which are reused.

Servers (uvicorn) close connections that were idle for 5 s. A client that was held up for so long
does not notice before it sends the next request on such a connection, and cannot tell that from a
server that has died. So idle connections are closed earlier, and a request on a closed one is sent
again.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from sluice.engines.plugin_common import pool_credential

# Idle connections are closed before the server closes them.
KEEP_ALIVE_SECONDS = 2.0


def session(**options: Any) -> aiohttp.ClientSession:
    """Return a client session for engines. `options` are aiohttp.TCPConnector's.

    Engines of a pool get the job's credential with each request.
    """
    credential = os.environ.get(pool_credential.VARIABLE)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_SECONDS, **options),
        headers={"Authorization": f"Bearer {credential}"} if credential else None,
    )


@asynccontextmanager
async def request(
    client: aiohttp.ClientSession, method: str, url: str, **options: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request as `client.request` does, and again if the connection ended without an answer.

    A server that has died refuses the second attempt, so at most one handler answers. A handler
    whose answer was lost may see the request twice. Raises what aiohttp raises.
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
    """Return True if an established connection ended before an answer came."""
    ended = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    return ended and not isinstance(error, aiohttp.ClientConnectorError)
