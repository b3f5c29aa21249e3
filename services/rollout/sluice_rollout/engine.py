"""The SGLang server beside this worker, over HTTP.

Two interfaces exist: since 0.5.21 an answer tells under which weight versions its tokens were made (`weight_versions`);
before, it tells only the version at its end. There we stream: each event carries the tokens since the last one, and our
plugin's list of their versions. Without the plugin it is the version at that moment, which may be that of an update
which has overtaken them: then spans are exact to a few tokens at an idle engine, and not at all at a busy one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import aiohttp

from sluice.sample import WeightSpan
from sluice.wire import http
from sluice.wire.membership import RESTING, WAKING

UNKNOWN_VERSION = -1
"""Weights that are none of ours: what the engine had at its start."""
_VERSIONS = "sluice_versions"
"""What our plugin tells in an answer of SGLang before 0.5.21: a version for each token."""
_ABORTED = re.compile(r"Request \S+ was aborted")
"""What SGLang 0.5.17 says of a request that it has not begun, where it says "abort" of one that it has."""


class EngineError(Exception):
    """The engine did not do what it was asked. The message says what and why."""


class PromptRefusedError(EngineError):
    """The engine will never take this prompt (too long, ...): no retry helps."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request generated. finish: stop, length or abort. spans: positions count from the first new token."""

    tokens: list[int]
    log_probs: list[float]
    spans: list[WeightSpan]
    finish: str
    matched_stop: str | None


class Engine:
    """One SGLang server."""

    def __init__(self, url: str, *, request_timeout: float = 1800.0) -> None:
        self.url = url.rstrip("/")
        self._request_timeout = request_timeout
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self.has_spans = True
        self.info: dict[str, Any] = {}

    async def __aenter__(self) -> Engine:
        self._session = http.session(limit=0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._aborts)
        if self._session:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the engine is used outside of `async with`")
        return self._session

    def _request(
        self, method: str, path: str, seconds: float, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=seconds)
        return http.request(self.session, method, self.url + path, timeout=timeout, **options)

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the server answers, and learn what it can do."""
        end = time.monotonic() + seconds
        reason = "no answer"
        while time.monotonic() < end:
            healthy, reason = await self.health(timeout=10.0)
            if healthy:
                paths = (await self._get("/openapi.json"))["paths"]
                self.has_spans = "/begin_weight_update" in paths
                self.info = await self._get("/server_info")
                return
            await asyncio.sleep(0.25)
        raise EngineError(f"engine {self.url} was not ready after {seconds:.0f} s: {reason}")

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        """(healthy, reason). `generate`: let the engine make a token, which a hung scheduler does not."""
        path = "/health_generate" if generate else "/health"
        try:
            async with self._request("GET", path, timeout) as answer:
                return answer.status == 200, f"{path} answered {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return False, f"{path}: {type(error).__name__} {error}"

    async def rests(self) -> bool:
        """Whether it has given its memory to the trainer, whose turn it is: it then answers nothing, and is well."""
        try:
            return (await self._get("/model_info")).get("weight_version") in (RESTING, WAKING)
        except EngineError:
            return False

    async def generate(
        self, rid: str, input_ids: list[int], sampling: dict[str, Any], *, cache: str = ""
    ) -> Generation:
        """Generate from token ids. An aborted request returns what it has.

        cache: requests with different ones share no prefixes in the engine's cache.
        """
        body = {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": not self.has_spans,
            "extra_key": cache or None,
        }
        try:
            async with self._request("POST", "/generate", self._request_timeout, json=body) as answer:
                if answer.status != 200:
                    await self._refuse(answer)
                if self.has_spans:
                    return _generation(await answer.json())
                return await streamed(events(answer.content.iter_any()))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"engine {self.url}: {type(error).__name__} {error}") from error
        except asyncio.CancelledError:  # nobody wants it any more, but the engine would go on for seconds
            self._aborts.add(abort := asyncio.create_task(self._try_abort(rid)))
            abort.add_done_callback(self._aborts.discard)
            raise

    async def _try_abort(self, rid: str) -> None:
        with contextlib.suppress(EngineError):
            await self.abort(rid)

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all. They answer with what they have."""
        body = {"rid": rid} if rid else {"abort_all": True}
        try:
            async with self._request("POST", "/abort_request", 10.0, json=body) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"engine {self.url}/abort_request: {type(error).__name__} {error}") from error

    async def _refuse(self, answer: aiohttp.ClientResponse) -> None:
        text = await answer.text()
        try:
            message = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = text[:500]
        kind = PromptRefusedError if answer.status == 400 else EngineError
        raise kind(f"engine answered {answer.status}: {message}")

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            async with self._request("GET", path, 30.0) as answer:
                answer.raise_for_status()
                body: dict[str, Any] = await answer.json()
                return body
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"engine {self.url}{path}: {type(error).__name__} {error}") from error


def version_number(text: str) -> int:
    """A weight version of ours is a number; what the engine started with has another name."""
    return int(text) if text.isdigit() else UNKNOWN_VERSION


def _generation(body: dict[str, Any]) -> Generation:
    meta = body["meta_info"]
    entries = meta["output_token_logprobs"]
    spans = [
        WeightSpan(version_number(span["version"]), span["start"], span["end"])
        for span in meta["weight_versions"]
        if span["end"] > span["start"]
    ]
    return _finished(meta, [int(e[1]) for e in entries], [float(e[0]) for e in entries], spans)


def _finished(meta: dict[str, Any], tokens: list[int], log_probs: list[float], spans: list[WeightSpan]) -> Generation:
    finish = meta["finish_reason"] or {"type": "abort"}
    matched = finish.get("matched")
    return Generation(tokens, log_probs, spans, finish["type"], matched if isinstance(matched, str) else None)


async def streamed(arriving: AsyncIterator[dict[str, Any]]) -> Generation:
    """Put a stream together. Where tokens have no versions of their own, a piece of several under a new one was begun
    under the one before: it counts as that.
    """
    spans: list[WeightSpan] = []
    entries: list[Any] = []
    meta: dict[str, Any] = {"finish_reason": None}
    before: int | None = None
    async for event in arriving:
        meta = event["meta_info"]
        if piece := meta.get("output_token_logprobs"):
            for version, same in groupby(_versions(meta, len(piece), before)):
                end = spans[-1].end if spans else 0
                start = spans.pop().start if spans and spans[-1].version == version else end
                spans.append(WeightSpan(version, start, end + len(list(same))))
            entries += piece
            before = version_number(meta["weight_version"])
    if (made := meta.get("completion_tokens", len(entries))) != len(entries):
        raise EngineError(f"engine: {len(entries)} tokens came for {made}; it needs --incremental-streaming-output")
    return _finished(meta, [int(e[1]) for e in entries], [float(e[0]) for e in entries], spans)


def _versions(meta: dict[str, Any], tokens: int, before: int | None) -> list[int]:
    """Of each token of a piece. before: what the answer said with the piece before this one."""
    known = meta.get(_VERSIONS) or []
    if len(known) == tokens and None not in known:
        return [version_number(version) for version in known]
    now = version_number(meta["weight_version"])
    return [now if before is None or tokens == 1 else before] * tokens


def _message(error: Any) -> str:
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, however large (aiohttp limits its lines)."""
    rest: list[bytes] = []
    async for piece in pieces:
        *lines, last = piece.split(b"\n")
        for line in lines:
            text = b"".join([*rest, line]).strip()
            rest = []
            if text.startswith(b"data:") and text != b"data: [DONE]":
                event: dict[str, Any] = json.loads(text[5:])
                if error := event.get("error"):
                    if _ABORTED.fullmatch(_message(error)):
                        return
                    refused = isinstance(error, dict) and error.get("code") == 400
                    raise (PromptRefusedError if refused else EngineError)(f"engine: {_message(error)}")
                yield event
        rest.append(last)
