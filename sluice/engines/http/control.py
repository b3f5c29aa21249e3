"""Control calls to an engine that speaks HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from sluice.engines.http import connections
from sluice.engines.plugin_common import base_model
from sluice.engines.protocol import BaseModel, EngineRefusedError

T = TypeVar("T")
# Statuses of an engine that does not do what it was asked. Others say that it cannot do it now, or
# that it is another server.
_REFUSALS = (400, 422, 500)
# Name and attempt of the trainer that calls. An engine with sluice's plugin refuses a trainer that
# was replaced.
SOURCE_HEADER = "x-sluice-source"


@dataclass(slots=True)
class HttpControl:
    """An engine, by its HTTP address (host:port), as one trainer calls it."""

    address: str
    session: aiohttp.ClientSession
    # Limit of a call, in seconds.
    timeout: float
    # Name and attempt of the trainer that calls, such as `trainer-0/3`.
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
        """Return one field of what the engine reports about itself. Raises EngineRefusedError."""
        answer = await self.call("GET", path)
        value = answer.get(field) if isinstance(answer, dict) else None
        if not isinstance(value, kind):
            raise EngineRefusedError(
                f"{path} answered {str(answer)[:200]!r}: expected an object with {field} "
                f"({kind.__name__})"
            )
        return value

    async def base_model(self) -> BaseModel:
        """Return the model that the engine has read. Raises EngineRefusedError if it cannot say."""
        try:
            answer = await self.call("GET", base_model.PATH)
        except EngineRefusedError as error:
            if "answered 404" not in str(error):
                raise
            raise EngineRefusedError(
                "the engine has not loaded the plugin of this release of sluice, which says to "
                f"which model an adapter would be added: see rollout.template. {error}",
                answered=True,
            ) from error
        fields = answer if isinstance(answer, dict) else {}
        if not isinstance(fields.get("digest"), str):
            raise EngineRefusedError(
                "the engine cannot say to which model the adapter would be added: "
                f"{fields.get('problem', str(answer)[:200])}",
                answered=True,
            )
        return BaseModel(str(fields.get("model")), fields["digest"])

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> Any:
        """Return the answer, read from JSON; None if it is empty. Raises EngineRefusedError.

        `seconds` limits this call, in place of the limit of all calls.
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
        """Return a refusal, with what to do about it if that is known."""
        return refusal
