"""A reward behind HTTP, in slime's protocol: POST {prompt, response, label};
the JSON answer is the reward.

Requests that fail in a way that may pass (no connection, no answer in time, 408, 429, 5xx) are
repeated with slime's back-off, min(2^n, 30) s + jitter, for at most four times the time limit of
one request. Any other refusal is final.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import aiohttp

from sluice.rewards.types import RewardError, RewardInput, shown

_CONNECTIONS = 64
_PATIENCE = 4
_LARGEST_ANSWER = 1 << 20
_MAY_PASS = (408, 429)


class Endpoint:
    """A URL that takes and answers JSON."""

    def __init__(
        self,
        url: str,
        timeout_seconds: float,
        back_off: Callable[[int], float] = lambda n: min(2.0**n, 30.0),
        *,
        connections: int = _CONNECTIONS,
        largest_answer: int = _LARGEST_ANSWER,
    ) -> None:
        self.url = url
        self._timeout = timeout_seconds
        self._back_off = back_off
        self._connections = connections
        self._largest = largest_answer
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: dict[str, Any]) -> Any:
        """The answer.

        Raises RewardError, with the last failure's cause, once patience has run out.
        """
        failure = "no answer"
        try:
            async with asyncio.timeout(_PATIENCE * self._timeout):
                attempt = 0
                while True:
                    try:
                        return await self.once(body)
                    except TimeoutError:
                        failure = f"no answer after {self._timeout:g} s"
                    except (aiohttp.ClientError, OSError) as error:
                        failure = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(self._back_off(attempt) + random.random())
                    attempt += 1
        except TimeoutError:
            raise RewardError(
                f"{self.url}: {failure}; given up after {attempt + 1} attempts", "timeout"
            ) from None

    async def once(self, body: dict[str, Any]) -> Any:
        """The answer to one request. Raises RewardError where it is final, else aiohttp's errors
        and TimeoutError.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections)
            )
        timeout = aiohttp.ClientTimeout(
            total=None
        )  # ours below also counts the wait for a free connection
        async with (
            asyncio.timeout(self._timeout),
            self._session.post(self.url, json=body, timeout=timeout) as response,
        ):
            data = await response.content.read(self._largest + 1)
            while not response.content.at_eof() and len(data) <= self._largest:
                data += await response.content.read(self._largest + 1)
            if response.status in _MAY_PASS or response.status >= 500:
                raise aiohttp.ClientError(f"{response.status} {response.reason}")
        if response.status >= 400:
            raise RewardError(
                f"{self.url}: {response.status} {response.reason}: {shown(data[:200])}", "refused"
            )
        if len(data) > self._largest:
            raise RewardError(
                f"{self.url}: the answer has more than {self._largest} bytes", "invalid"
            )
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise RewardError(
                f"{self.url}: expected JSON, got {shown(data[:200])}", "invalid"
            ) from None

    async def close(self) -> None:
        if self._session:
            await self._session.close()


class Remote(Endpoint):
    async def __call__(self, sample: RewardInput) -> Any:
        """The value of a reward, yet unread."""
        return await self.post(
            {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        )
