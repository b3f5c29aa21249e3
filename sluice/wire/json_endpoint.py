"""A URL that takes JSON by POST and answers JSON, asked again while a failure may pass.

Failures that may pass are: no connection, no answer in time, and the statuses 408, 429 and 5xx.
Such a request is repeated with slime's back-off, min(2^n, 30) s + jitter, for at most four times
the time limit of one request. Any other refusal is final.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import aiohttp

from sluice.input_checks import shown

_CONNECTIONS = 64
_PATIENCE = 4  # times the limit of one request
_LARGEST_ANSWER = 1 << 20  # bytes
_TRANSIENT_STATUSES = (408, 429)


class JsonEndpoint:
    """A URL, with a pool of connections.

    Parameters
    ----------
    url
        Address that requests are posted to.
    timeout_seconds
        Time limit of one request. It includes the wait for a free connection.
    error
        Type of the exceptions that `post` and `once` raise, called with a message for people and a
        reason for metrics: `timeout`, `refused` or `invalid`.
    back_off
        Seconds before attempt n + 1, to which up to one second of jitter is added.
    connections
        Most requests at a time.
    largest_answer
        Most bytes of an answer.

    """

    def __init__(
        self,
        url: str,
        timeout_seconds: float,
        error: Callable[[str, str], Exception],
        back_off: Callable[[int], float] = lambda n: min(2.0**n, 30.0),
        *,
        connections: int = _CONNECTIONS,
        largest_answer: int = _LARGEST_ANSWER,
    ) -> None:
        self.url = url
        self._timeout = timeout_seconds
        self._error = error
        self._back_off = back_off
        self._connections = connections
        self._largest = largest_answer
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: dict[str, Any]) -> Any:
        """Post a body and return the answer, read from JSON.

        Raises
        ------
        Exception
            Of the type `error`: with the last failure once the patience has run out, or at once if
            the refusal is final.

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
            raise self._error(
                f"{self.url}: {failure}; given up after {attempt + 1} attempts", "timeout"
            ) from None

    async def once(self, body: dict[str, Any]) -> Any:
        """Post a body one time and return the answer, read from JSON.

        Raises
        ------
        Exception
            Of the type `error`, if the refusal is final.
        aiohttp.ClientError, OSError, TimeoutError
            If the failure may pass.

        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections)
            )
        # aiohttp's own limit would not count the wait for a free connection.
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            asyncio.timeout(self._timeout),
            self._session.post(self.url, json=body, timeout=timeout) as response,
        ):
            data = await response.content.read(self._largest + 1)
            while not response.content.at_eof() and len(data) <= self._largest:
                data += await response.content.read(self._largest + 1)
            if response.status in _TRANSIENT_STATUSES or response.status >= 500:
                raise aiohttp.ClientError(f"{response.status} {response.reason}")
        if response.status >= 400:
            raise self._error(
                f"{self.url}: {response.status} {response.reason}: {shown(data[:200])}", "refused"
            )
        if len(data) > self._largest:
            raise self._error(
                f"{self.url}: the answer has more than {self._largest} bytes", "invalid"
            )
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self._error(
                f"{self.url}: expected JSON, got {shown(data[:200])}", "invalid"
            ) from None

    async def close(self) -> None:
        if self._session:
            await self._session.close()
