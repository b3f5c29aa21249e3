"""Models that episodes ask besides the policy (`rollout.models`): a judge, an opponent.

Their requests go to their servers as they are, but for the name and the key. Nothing of them is
kept or trained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from sluice.api.groups.episode import OtherModel
from sluice_rollout import metrics
from sluice_rollout.gateway.errors import GatewayError
from sluice_rollout.relay import relay


@dataclass(frozen=True, slots=True)
class Other:
    """One of them. key: what its server wants to see; empty: nothing."""

    model: OtherModel
    key: str
    session: aiohttp.ClientSession

    @classmethod
    def of(cls, model: OtherModel, variables: Mapping[str, str]) -> Other:
        """The model, with its key from the worker's variables. Used where an event loop runs."""
        timeout = aiohttp.ClientTimeout(total=model.timeout_seconds, sock_connect=10)
        session = aiohttp.ClientSession(timeout=timeout)
        return cls(model, variables.get(model.key_variable, ""), session)

    async def close(self) -> None:
        await self.session.close()

    async def forward(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        """Its answer to a request. Raises GatewayError where it has none."""
        path = request.path.removeprefix("/v1")
        asked = {**body, "model": self.model.model or self.model.name}
        headers = {"Authorization": f"Bearer {self.key}", "x-api-key": self.key} if self.key else {}
        start = time.monotonic()
        try:
            return await relay(
                self.session, request, f"{self.model.url.rstrip('/')}{path}", headers,
                json.dumps(asked).encode(),
            )  # fmt: skip
        except (aiohttp.ClientError, TimeoutError) as error:
            text = f"model {self.model.name} at {self.model.url} does not answer: {error!r}"
            raise GatewayError(502, text, "server_error", "unavailable", retry=True) from error
        finally:
            seconds = time.monotonic() - start
            metrics.GATEWAY_OTHER_SECONDS.labels(model=self.model.name).observe(seconds)
