"""A reward behind HTTP, in slime's protocol: POST {prompt, response, label}; the JSON answer is the reward.

Ten attempts with back-off min(2^n, 30) s + jitter, as slime's rm_hub does; all of it under the reward's time limit.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp

from sluice.rewards.types import RewardError, RewardInput

_ATTEMPTS = 10
_CONNECTIONS = 64


class Remote:
    def __init__(self, url: str, timeout_seconds: float) -> None:
        self._url = url
        self._timeout = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, sample: RewardInput) -> Any:
        body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        try:
            async with asyncio.timeout(self._timeout):
                return await self._retrying(body)
        except TimeoutError as error:
            raise RewardError(f"{self._url}: no reward after {self._timeout:g} s") from error

    async def _retrying(self, body: dict[str, Any]) -> Any:
        for attempt in range(_ATTEMPTS):
            try:
                return await self._post(body)
            except (aiohttp.ClientError, ValueError) as error:
                if attempt == _ATTEMPTS - 1:
                    raise RewardError(f"{self._url}: {type(error).__name__}: {error}") from error
            await asyncio.sleep(min(2**attempt, 30) + random.random())
        raise AssertionError("unreachable")

    async def _post(self, body: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_CONNECTIONS))
        async with self._session.post(self._url, json=body) as response:
            response.raise_for_status()
            return await response.json(content_type=None)

    async def close(self) -> None:
        if self._session:
            await self._session.close()
