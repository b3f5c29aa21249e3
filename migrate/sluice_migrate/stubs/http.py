"""slime.utils.http_utils: JSON requests to the engine. verl's functions use it too."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

# Between two attempts.
_PAUSE_SECONDS = 1.0
# Longer than any request that the gateway accepts.
_REQUEST_SECONDS = 7200.0


class PostError(Exception):
    """An error response, with its HTTP status and the code of an OpenAI error, if it has one."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.code = status, code


async def post(
    url: str, payload: Any, max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """Post JSON; returns the response as JSON, or as text if it is not JSON.

    Parameters
    ----------
    url
        The address.
    payload
        The value that is sent as JSON.
    max_retries
        Attempts in all if the server does not respond, or responds with 429, 502 or 504.
    headers
        Additional headers.

    Raises
    ------
    PostError
        The server responds with an error.
    aiohttp.ClientError
        The server does not respond.

    """
    for remaining in reversed(range(max(max_retries, 1))):
        try:
            return await _request("POST", url, payload, headers)
        except (PostError, aiohttp.ClientError) as error:
            if not remaining or (
                isinstance(error, PostError) and error.status not in (429, 502, 504)
            ):
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
    raise AssertionError("the last attempt returns or raises")


async def get(url: str) -> Any:
    """Get an address; returns and raises as `post` does."""
    return await _request("GET", url, None, None)


async def _request(method: str, url: str, payload: Any, headers: dict[str, str] | None) -> Any:
    limit = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=limit, headers=headers) as session,
        session.request(method, url, json=payload) as response,
    ):
        text = await response.text()
        if response.status >= 400:
            raise _error(response.status, text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _error(status: int, text: str) -> PostError:
    try:
        error = json.loads(text)["error"]
        return PostError(status, str(error["message"]), error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return PostError(status, text[:500])
