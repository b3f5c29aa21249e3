"""The client of the server, over HTTP: tokens in and tokens out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sluice.engines.http.client import PROBE_SECONDS, HttpClient, refusal_text, version_number
from sluice.engines.protocol import EngineError, Generation, PromptRefusedError, ServerInfo
from sluice.samples.sample import WeightSpan

_PROBE = {"rid": "", "input_ids": [0], "sampling": {"max_new_tokens": 1, "ignore_eos": True}}


class Client(HttpClient):
    """A server of `sluice.engines.transformers.server`."""

    generate_path = "/generate"
    info = ServerInfo(1, None)

    async def learn(self) -> None:
        self.info = ServerInfo(1, int((await self.get("/info"))["context_tokens"]))

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        """Return (healthy, reason). With `generate` the engine has to make a token."""
        if generate:
            return await self.healthy(self.generate_path, timeout, json=_PROBE)
        return await self.healthy("/health", timeout)

    async def rests(self) -> bool:
        """Return False: the engine never gives its memory to the trainer."""
        return False

    async def paused_seconds(self) -> float:
        try:
            return float((await self.get("/info", PROBE_SECONDS))["paused_seconds"])
        except EngineError:
            return 0.0

    async def answers(self) -> bool:
        try:
            return "version" in await self.get("/info")
        except EngineError:
            return False

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all. They answer with the tokens that they have."""
        await self.post("/abort_request", {"rid": rid})

    def body(
        self, rid: str, input_ids: list[int], sampling: Mapping[str, Any], cache: str
    ) -> dict[str, Any]:
        """Return the request. `cache` is not in it: the engine has no prefix cache."""
        given = {name: value for name, value in sampling.items() if value is not None}
        return {"rid": rid, "input_ids": input_ids, "sampling": given}

    def read(self, status: int, text: str) -> Generation:
        if status == 200:
            return generation(text)
        kind = PromptRefusedError if status == 400 else EngineError
        raise kind(f"engine answered {status}: {refusal_text(text)}")


def generation(text: str) -> Generation:
    """Return the generation of an answer. Raises EngineError if it is not this server's."""
    try:
        answer = json.loads(text)
        return Generation(
            answer["tokens"],
            answer["log_probs"],
            [WeightSpan(version_number(v), start, end) for v, start, end in answer["spans"]],
            answer["finish"],
            answer["matched_stop"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"engine: not an answer of sluice's engine transformers: {type(error).__name__} {error}"
        ) from error
