"""The client of an SGLang server, over HTTP.

Releases tell in two ways which weights sampled a token. From 0.5.21 on, an answer has
`weight_versions`, as spans. Before, the plugin adds a version for each token; SGLang itself tells
only the version at the answer's end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import aiohttp
import numpy as np

from sluice.engines.http.client import (
    POST_SECONDS,
    PROBE_SECONDS,
    REQUEST_SECONDS,
    HttpClient,
    version_number,
)
from sluice.engines.protocol import (
    RESTING,
    WAKING,
    EngineError,
    Generation,
    PromptRefusedError,
    ServerInfo,
    WeightsLostError,
)
from sluice.engines.sglang import request_batching
from sluice.engines.sglang.image_requests import with_images
from sluice.engines.sglang.request_batching import RequestBatcher
from sluice.images.image import Image
from sluice.samples.sample import Experts, WeightSpan, compact

# Key of the plugin in an answer of SGLang before 0.5.21: a version for each token, None before any
# update.
_VERSIONS = "sluice_versions"
# Tokens of a part of a streamed answer. The first part has one. Each part passes through three
# processes of SGLang, so single tokens would slow the engine down for all requests.
_TOKENS_OF_PART = 8
# What the status of an answer says. 410 comes from an engine of a pool.
_REFUSALS: dict[int, type[EngineError]] = {400: PromptRefusedError, 410: WeightsLostError}
# Every server refuses this at once, except in a pause, when it looks at no request.
_IMPOSSIBLE = {"input_ids": [0], "sampling_params": {"temperature": -1.0, "max_new_tokens": 1}}
# SGLang 0.5.17 refuses a request that it has not begun in these words; for one that it has begun it
# answers "abort".
_ABORTED = re.compile(r"Request \S+ was aborted")


class Client(HttpClient):
    """An SGLang server."""

    generate_path = "/generate"

    def __init__(self, url: str, *, request_seconds: float = REQUEST_SECONDS) -> None:
        super().__init__(url, request_seconds=request_seconds)
        self._probe: asyncio.Task[None] | None = None
        self._probed_since = 0.0
        self.frozen = self._tells_experts = self._speculates = False
        self.info = ServerInfo(1, None)
        self._batcher: RequestBatcher | None = None

    async def __aexit__(self, *_: object) -> None:
        if self._batcher:
            await self._batcher.close()
        if self._probe:
            self._probe.cancel()
            await asyncio.wait({self._probe})
        await super().__aexit__()

    async def learn(self) -> None:
        facts = await self.get("/server_info")
        self.info = server_info(facts)
        self._tells_experts = bool(facts.get("enable_return_routed_experts"))
        self._speculates = bool(facts.get("speculative_algorithm"))
        self.frozen = await self._freeze()
        batching = await self._batching()
        self._batcher = None if batching is None else RequestBatcher(self.session, self.url)
        self.sends_parts = bool(batching and batching.get("parts"))

    async def ask(self, body: dict[str, Any], images: Sequence[Image] = ()) -> tuple[int, str]:
        if images:
            json_type = {"Content-Type": "application/json"}
            return await self.post_to_generate(data=with_images(body, images), headers=json_type)
        return await (self._batcher.ask(body) if self._batcher else super().ask(body, images))

    async def ask_by_parts(
        self, body: dict[str, Any], on_part: Callable[[str], None]
    ) -> tuple[int, str]:
        assert self._batcher
        sampling = body["sampling_params"] | {"stream_interval": _TOKENS_OF_PART}
        return await self._batcher.ask(
            body | {"sampling_params": sampling, "stream": True}, on_part
        )

    async def _batching(self) -> dict[str, Any] | None:
        """Return what the plugin says of batched requests; None without the plugin.

        An earlier plugin says nothing, and sends no parts.
        """
        try:
            async with self.request("POST", request_batching.PATH, POST_SECONDS, json=[]) as answer:
                if answer.status != 200:
                    return None
                said: dict[str, Any] = json.loads(await answer.text() or "{}")
                return said
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            path = request_batching.PATH
            raise EngineError(f"engine {self.url}{path}: {type(error).__name__} {error}") from error

    async def _freeze(self) -> bool:
        """Exclude the server's imports from its garbage collection. Returns False if it refuses.

        Otherwise Python looks through all imported modules again and again, 0.4 s without a token
        each time. SGLang 0.5.21 does this by itself. A server with an admin key refuses.
        """
        return await self.post("/freeze_gc") == 200

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        """Return (healthy, reason).

        With `generate` the engine has to make a token, which a hung scheduler does not.
        """
        return await self.healthy("/health_generate" if generate else "/health", timeout)

    async def rests(self) -> bool:
        """Return True if the engine has given its memory to the trainer.

        It then answers no request, and is healthy.
        """
        try:
            return (await self.get("/model_info")).get("weight_version") in (RESTING, WAKING)
        except EngineError:
            return False

    async def paused_seconds(self) -> float:
        """Return how long the engine has been seen paused for a weight update; 0 if it is not.

        A paused server answers no request until it resumes. So a request that it would refuse stays
        pending, and its answer tells that the pause is over. This needs no answer of the scheduler,
        which may be waiting for weights.
        """
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._ask_impossible())
            self._probed_since = time.monotonic()
        await asyncio.wait({self._probe}, timeout=PROBE_SECONDS)
        return 0.0 if self._probe.done() else time.monotonic() - self._probed_since

    async def answers(self) -> bool:
        """Return True if the server's scheduler answers, which it does in a pause too."""
        try:
            return bool(await self.get("/server_info"))
        except EngineError:
            return False

    async def _ask_impossible(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            await self.status("POST", self.generate_path, None, json=_IMPOSSIBLE)

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all. They answer with the tokens that they have."""
        await self.post("/abort_request", {"rid": rid} if rid else {"abort_all": True})

    def body(
        self, rid: str, input_ids: list[int], sampling: Mapping[str, Any], cache: str
    ) -> dict[str, Any]:
        if self._speculates and sampling.get("min_p"):
            raise PromptRefusedError(
                "sampling: SGLang ignores min_p under speculative decoding: leave min_p or "
                "rollout.speculative out"
            )
        return {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "extra_key": cache or None,
            **({"return_routed_experts": True} if self._tells_experts else {}),
        }

    def read(self, status: int, text: str) -> Generation:
        if status != 200:
            return refusal(status, text)
        try:
            return generation(json.loads(text))
        except ValueError as error:
            raise EngineError(
                f"engine: not an answer of SGLang's /generate: {text[:200]!r}"
            ) from error


def server_info(body: Mapping[str, Any]) -> ServerInfo:
    """Read the answer of /server_info."""
    context = body.get("context_length")
    return ServerInfo(int(body.get("tp_size", 1)), int(context) if context else None)


def refusal(status: int, text: str) -> Generation:
    """Return an empty generation if the request was aborted before it began; raise otherwise.

    For answers whose status is not 200.
    """
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:500]
    if _ABORTED.fullmatch(message):
        return Generation([], [], [], "abort", None)
    kind = _REFUSALS.get(status, EngineError)
    raise kind(f"engine answered {status}: {message}")


def generation(body: Any) -> Generation:
    """Return the generation of an answer. Raises EngineError if it is not SGLang's."""
    try:
        return _generation(body["meta_info"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"engine: not an answer of SGLang's /generate: {type(error).__name__} {error}"
        ) from error


def _generation(meta: dict[str, Any]) -> Generation:
    """Raises EngineError if the answer does not tell which weights sampled its tokens."""
    finish, entries = meta["finish_reason"], meta["output_token_logprobs"]
    spans = _spans(meta, len(entries))
    if spans is None:
        if finish["type"] != "abort":
            raise EngineError(
                "engine: the answer does not tell which weights sampled its tokens. Before SGLang "
                "0.5.21 sluice's plugin adds this: set weightSync.enginePlugin to true, or take a "
                "later release"
            )
        # Aborted in the queue, in which a `retract` had put the request: the plugin adds no
        # versions to that answer.
        spans, entries = [], []
    matched = finish.get("matched")
    return Generation(
        [int(e[1]) for e in entries],
        [float(e[0]) for e in entries],
        spans,
        finish["type"],
        matched if isinstance(matched, str) else None,
        _experts(meta) if spans else None,
        int(meta.get("spec_verify_ct") or 0),
        meta.get("cached_tokens"),
    )


def _experts(meta: dict[str, Any]) -> Experts | None:
    """Read the experts of tokens: int32 [tokens but the last, layers, experts of a token]."""
    if not meta.get("routed_experts"):
        return None
    ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4")
    return compact(ids.reshape(meta["prompt_tokens"] + meta["completion_tokens"] - 1, -1))


def _spans(meta: dict[str, Any], tokens: int) -> list[WeightSpan] | None:
    """Return the weight versions of the tokens; None if the answer does not tell them."""
    if "weight_versions" in meta:
        return [
            WeightSpan(version_number(s["version"]), s["start"], s["end"])
            for s in meta["weight_versions"]
            if s["end"] > s["start"]
        ]
    versions = meta.get(_VERSIONS, [])
    if len(versions) != tokens:
        return None
    if not any(versions):
        # No update yet: these are the first weights, by the name that they have now.
        versions = [meta["weight_version"]] * tokens
    spans, start = [], 0
    for version, same in groupby(versions):
        end = start + len(list(same))
        spans.append(WeightSpan(version_number(version or ""), start, end))
        start = end
    return spans
