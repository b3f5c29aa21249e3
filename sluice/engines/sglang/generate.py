"""The SGLang server beside this worker, over HTTP.

Which weights sampled a token two releases tell in two ways: since 0.5.21 an answer has
`weight_versions`, as spans; before, our plugin gives it a version for each token (SGLang itself
tells only the version at the answer's end).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Self

import aiohttp

from sluice.engines.base import (
    RESTING,
    UNKNOWN_VERSION,
    WAKING,
    EngineError,
    Generation,
    PromptRefusedError,
    RequestTimeoutError,
    ServerInfo,
)
from sluice.engines.sglang import http
from sluice.sample import WeightSpan
from sluice.telemetry import logs

_VERSIONS = "sluice_versions"
"""What our plugin tells in an answer of SGLang before 0.5.21: a version for each token, None before
any update."""
REQUEST_SECONDS = 1800.0
SLOWEST_TOKENS_A_SECOND = 1.0
"""Time for a request: `REQUEST_SECONDS`, in which it may wait for its turn or through a pause, and
for each token that it may generate as long as the slowest engine takes. That finds a request that a
healthy engine has lost; one that is dead or hung is found within minutes (health.py).
"""
PROBE_SECONDS = 3.0
_IMPOSSIBLE = {"input_ids": [0], "sampling_params": {"temperature": -1.0, "max_new_tokens": 1}}
"""Every server refuses this at once, except in a pause, when it looks at no request."""
_ABORTED = re.compile(r"Request \S+ was aborted")
"""What SGLang 0.5.17 refuses a request with that it has not begun, where it says "abort" of one
that it has."""


class Client:
    """One SGLang server."""

    def __init__(self, url: str, *, request_seconds: float = REQUEST_SECONDS) -> None:
        self.url = url.rstrip("/")
        self._request_seconds = request_seconds
        self._session: aiohttp.ClientSession | None = None
        self._probe: asyncio.Task[None] | None = None
        self._probed_since = 0.0
        self._aborts: set[asyncio.Task[None]] = set()
        self.frozen = False
        self.info = ServerInfo(1, None)

    async def __aenter__(self) -> Self:
        self._session = http.session(limit=0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._aborts)
        if self._probe:
            self._probe.cancel()
            await asyncio.wait({self._probe})
        if self._session:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the engine is used outside of `async with`")
        return self._session

    def _request(
        self, method: str, path: str, seconds: float | None, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=seconds)
        return http.request(self.session, method, self.url + path, timeout=timeout, **options)

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the server answers, and learn how it was started."""
        end = time.monotonic() + seconds
        reason = "no answer"
        while time.monotonic() < end:
            healthy, reason = await self.health(timeout=10.0)
            if healthy:
                self.info = server_info(await self._get("/server_info"))
                self.frozen = await self._freeze()
                logs.get().info("engine ready", url=self.url, garbage_frozen=self.frozen)
                return
            await asyncio.sleep(0.25)
        raise EngineError(f"engine {self.url} was not ready after {seconds:.0f} s: {reason}")

    async def _freeze(self) -> bool:
        """Take its start out of its garbage collection. False: it refuses.

        Python looks through all that the server has imported, again and again: 0.4 s without a
        token each time. SGLang 0.5.21 does so by itself. A server whose user keeps its admin key to
        themselves refuses.
        """
        return await self._post("/freeze_gc") == 200

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        """(healthy, reason). `generate`: let the engine make a token, which a hung scheduler does
        not.
        """
        path = "/health_generate" if generate else "/health"
        try:
            async with self._request("GET", path, timeout) as answer:
                return answer.status == 200, f"{path} answered {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return False, f"{path}: {type(error).__name__} {error}"

    async def rests(self) -> bool:
        """True where it has given its memory to the trainer, whose turn it is: it then answers
        nothing, and is well.
        """
        try:
            return (await self._get("/model_info")).get("weight_version") in (RESTING, WAKING)
        except EngineError:
            return False

    async def paused_seconds(self) -> float:
        """How long it has been seen paused, as it is for a weight update; 0: it is not.

        A paused server answers no request until it goes on, so one that it would refuse stays with
        it, and tells by its answer that the pause is over. This asks nothing of the scheduler,
        which may be waiting for weights.
        """
        if self._probe is None or self._probe.done():
            self._probe, self._probed_since = (
                asyncio.create_task(self._ask_impossible()),
                time.monotonic(),
            )
        await asyncio.wait({self._probe}, timeout=PROBE_SECONDS)
        return 0.0 if self._probe.done() else time.monotonic() - self._probed_since

    async def answers(self) -> bool:
        """True where the server's scheduler answers, which it does in a pause too."""
        try:
            return bool(await self._get("/server_info"))
        except EngineError:
            return False

    async def _ask_impossible(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._request("POST", "/generate", None, json=_IMPOSSIBLE) as answer:
                await answer.read()

    async def generate(
        self, rid: str, input_ids: list[int], sampling: Mapping[str, Any], *, cache: str = ""
    ) -> Generation:
        """Generate from token ids. An aborted request returns what it has.

        cache: requests with different ones share no prefixes in the engine's cache. Raises
        EngineError.
        """
        body = {
            "input_ids": input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "extra_key": cache or None,
        }
        tokens = int(sampling.get("max_new_tokens", 0))
        try:
            return await self._send(body | {"rid": rid}, tokens)
        except (aiohttp.ClientError, OSError) as error:
            if not http.has_ended(error):
                raise self._lost(error) from error
        # The engine may be at work on it, if only the answer was lost: under the same name it would
        # be refused, and under one that begins with that name it would be taken back with it.
        try:
            return await self._send(body | {"rid": f"again-{rid}"}, tokens)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error

    async def _send(self, body: dict[str, Any], tokens: int) -> Generation:
        """Send one request to generate up to `tokens`, once. Where nobody waits for its answer, it
        is taken back.
        """
        rid, seconds = body["rid"], self._request_seconds + tokens / SLOWEST_TOKENS_A_SECOND
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self.session.post(
                f"{self.url}/generate", json=body, timeout=timeout
            ) as answer:
                if answer.status == 200:
                    return generation(await answer.json())
                return refusal(answer.status, await answer.text())
        except TimeoutError as error:
            self._abort_soon(rid)
            text = (
                f"engine {self.url}: no answer after {seconds:.0f} s to a request for up to "
                f"{tokens} tokens"
            )
            raise RequestTimeoutError(text) from error
        except (aiohttp.ClientError, OSError, asyncio.CancelledError):
            self._abort_soon(rid)
            raise

    def _lost(self, error: Exception) -> EngineError:
        return EngineError(f"engine {self.url}: {type(error).__name__} {error}")

    def _abort_soon(self, rid: str) -> None:
        """Nobody wants this request's answer any more, but the engine would go on with it."""
        self._aborts.add(abort := asyncio.create_task(self._try_abort(rid)))
        abort.add_done_callback(self._aborts.discard)

    async def _try_abort(self, rid: str) -> None:
        with contextlib.suppress(EngineError):
            await self.abort(rid)

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all. They answer with what they have."""
        body = {"rid": rid} if rid else {"abort_all": True}
        await self._post("/abort_request", body)

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> int:
        """The answer's status."""
        try:
            async with self._request("POST", path, 10.0, json=body) as answer:
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"engine {self.url}{path}: {type(error).__name__} {error}") from error

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            async with self._request("GET", path, 30.0) as answer:
                answer.raise_for_status()
                body: dict[str, Any] = await answer.json()
                return body
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"engine {self.url}{path}: {type(error).__name__} {error}") from error


def server_info(body: Mapping[str, Any]) -> ServerInfo:
    """From /server_info."""
    context = body.get("context_length")
    return ServerInfo(int(body.get("tp_size", 1)), int(context) if context else None)


def version_number(text: str) -> int:
    """A weight version of ours is a number; what the engine started with has another name."""
    return int(text) if text.isdigit() else UNKNOWN_VERSION


def refusal(status: int, text: str) -> Generation:
    """An empty generation, where the request was aborted before it began. Raises for any other
    answer but 200.
    """
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:500]
    if _ABORTED.fullmatch(message):
        return Generation([], [], [], "abort", None)
    kind = PromptRefusedError if status == 400 else EngineError
    raise kind(f"engine answered {status}: {message}")


def generation(body: Any) -> Generation:
    """The generation of an answer. Raises EngineError where it is none of SGLang's."""
    try:
        return _generation(body["meta_info"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"engine: not an answer of SGLang's /generate: {type(error).__name__} {error}"
        ) from error


def _generation(meta: dict[str, Any]) -> Generation:
    """Raises EngineError where it does not tell which weights sampled its tokens."""
    finish, entries = meta["finish_reason"], meta["output_token_logprobs"]
    spans = _spans(meta, len(entries))
    if spans is None:
        if finish["type"] != "abort":
            raise EngineError(
                "engine: the answer does not tell which weights sampled its tokens. Before SGLang "
                "0.5.21 our plugin "
                "tells: set weightSync.enginePlugin to true, or take a later release"
            )
        spans, entries = (
            [],
            [],
        )  # aborted in the queue, where a `retract` had put it: that answer has nothing of ours
    matched = finish.get("matched")
    return Generation(
        [int(e[1]) for e in entries],
        [float(e[0]) for e in entries],
        spans,
        finish["type"],
        matched if isinstance(matched, str) else None,
    )


def _spans(meta: dict[str, Any], tokens: int) -> list[WeightSpan] | None:
    """None: the answer does not tell."""
    if "weight_versions" in meta:
        told = meta["weight_versions"]
        return [
            WeightSpan(version_number(s["version"]), s["start"], s["end"])
            for s in told
            if s["end"] > s["start"]
        ]
    versions = meta.get(_VERSIONS, [])
    if len(versions) != tokens:
        return None
    if not any(
        versions
    ):  # no update yet: weights of the start, or the name that they were given since
        versions = [meta["weight_version"]] * tokens
    spans, start = [], 0
    for version, same in groupby(versions):
        end = start + len(list(same))
        spans.append(WeightSpan(version_number(version or ""), start, end))
        start = end
    return spans
