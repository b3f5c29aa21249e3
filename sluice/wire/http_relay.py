"""Relays a request to another HTTP server, and its answer as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

# Headers that belong to one connection, or that are written here.
_DROPPED = {
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "host",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-api-key",
}


async def relay(
    session: aiohttp.ClientSession,
    request: web.Request,
    url: str,
    headers: Mapping[str, str],
    body: Any,
) -> web.StreamResponse:
    """Send the request to `url`, with its method and headers, overridden by `headers`.

    Raises aiohttp.ClientError or TimeoutError if the server does not answer.
    """
    async with session.request(
        request.method,
        url,
        headers=_kept(request.headers) | dict(headers),
        data=body,
        allow_redirects=False,
    ) as answer:
        response = web.StreamResponse(status=answer.status, headers=_kept(answer.headers))
        await response.prepare(request)
        async for part in answer.content.iter_any():
            await response.write(part)
        await response.write_eof()
    return response


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in headers.items() if name.lower() not in _DROPPED}
