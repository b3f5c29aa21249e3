"""JSON over HTTP as the functions of slime and verl ask it of their engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

_PAUSE_SECONDS = 1.0
_REQUEST_SECONDS = 7200.0
"""Longer than any request that the gateway lets wait."""


class PostError(Exception):
    """An answer that is an error. status: of HTTP. code: that of OpenAI's errors, if it has one."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.code = status, code


async def post(
    url: str, payload: Any, max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """The answer to a request: its JSON, else its text.

    max_retries: attempts where the server is away, or says that it may be asked again. Raises
    PostError, or aiohttp.ClientError where no server answers.
    """
    for left in reversed(range(max(max_retries, 1))):
        try:
            return await _asked("POST", url, payload, headers)
        except (PostError, aiohttp.ClientError) as error:
            if not left or (isinstance(error, PostError) and error.status not in (429, 502, 504)):
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
    raise AssertionError("the last attempt returns or raises")


async def get(url: str) -> Any:
    """The JSON, or the text, behind an address. Raises as `post` does."""
    return await _asked("GET", url, None, None)


async def _asked(method: str, url: str, payload: Any, headers: dict[str, str] | None) -> Any:
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
