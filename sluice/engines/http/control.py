"""Control calls to an engine that speaks HTTP, whichever it is: how one is made, and fails."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from sluice.engines.http import connections
from sluice.engines.protocol import EngineRefusedError

T = TypeVar("T")
_REFUSALS = (400, 422, 500)
"""Statuses of an engine that does not do what it was asked. Others say that it cannot now, or that
it is another server."""
SOURCE_HEADER = "x-sluice-source"
"""Name and attempt of the trainer that calls: an engine with our plugin refuses a replaced one."""


@dataclass(slots=True)
class HttpControl:
    """One engine, by its HTTP address (host:port). source: who calls it, as `trainer-0/3`."""

    address: str
    session: aiohttp.ClientSession
    timeout: float
    source: str

    def request(
        self, method: str, path: str, **options: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=options.pop("seconds", None) or self.timeout)
        headers = {SOURCE_HEADER: self.source, **options.pop("headers", {})}
        url = f"http://{self.address}{path}"
        return connections.request(
            self.session, method, url, timeout=timeout, headers=headers, **options
        )

    async def ask(self, path: str, field: str, kind: type[T]) -> T:
        """One field of what the engine tells about itself. Raises EngineRefusedError."""
        answer = await self.call("GET", path)
        value = answer.get(field) if isinstance(answer, dict) else None
        if not isinstance(value, kind):
            raise EngineRefusedError(
                f"{path} answered {str(answer)[:200]!r}: expected an object with {field} "
                f"({kind.__name__})"
            )
        return value

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> Any:
        """The answer, read from JSON; None: it is empty. Raises EngineRefusedError.

        seconds: to wait for it; None: as for any call.
        """
        started = time.monotonic()
        options = {"json": body, "headers": headers or {}, "seconds": seconds}
        try:
            async with self.request(method, path, **options) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise EngineRefusedError(
                        self.explained(f"{path} answered {answer.status}: {text[:500]}"),
                        answered=answer.status in _REFUSALS,
                    )
                return await answer.json(content_type=None) if text else None
        except TimeoutError as error:
            waited = time.monotonic() - started
            raise EngineRefusedError(f"{path}: no answer after {waited:.0f} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineRefusedError(f"{path}: {type(error).__name__} {error}") from error

    def explained(self, refusal: str) -> str:
        """A refusal, with what to do about it where that is known."""
        return refusal
