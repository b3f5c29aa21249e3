"""Requests to an engine that speaks HTTP: sent, repeated and taken back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from sluice.engines.http import connections
from sluice.engines.plugin_common.pool_credential import LEAVE
from sluice.engines.protocol import (
    UNKNOWN_VERSION,
    EngineError,
    Generation,
    OnPart,
    PromptRefusedError,
    RequestTimeoutError,
)
from sluice.images.image import Image
from sluice.telemetry import logs

# Time limit of a request: REQUEST_SECONDS, in which it may be queued or sit through a pause, and
# the time of the slowest engine for each token that it may generate. The limit finds a request that
# a healthy engine has lost; an engine that is dead or hung is found within minutes (health.py).
REQUEST_SECONDS = 1800.0
SLOWEST_TOKENS_A_SECOND = 1.0
PROBE_SECONDS = 3.0
GET_SECONDS = 30.0
POST_SECONDS = 10.0


class HttpClient:
    """A server. Subclasses define how a request and an answer look."""

    generate_path: str

    # True if the server sends parts of an answer. Valid once `learn` has returned.
    sends_parts = False

    def body(
        self, rid: str, input_ids: list[int], sampling: Mapping[str, Any], cache: str
    ) -> dict[str, Any]:
        """Return the body of a request to generate."""
        raise NotImplementedError

    def read(self, status: int, text: str) -> Generation:
        """Return the generation of an answer. Raises EngineError if it is not one."""
        raise NotImplementedError

    async def learn(self) -> None:
        """Learn how the server, which is healthy, was started."""
        raise NotImplementedError

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all. They answer with the tokens that they have."""
        raise NotImplementedError

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        """Return (healthy, reason). With `generate` the engine has to make a token."""
        raise NotImplementedError

    def __init__(self, url: str, *, request_seconds: float = REQUEST_SECONDS) -> None:
        self.url = url.rstrip("/")
        self._request_seconds = request_seconds
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._session = connections.session(limit=0)
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

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the server answers, and learn how it was started."""
        began = time.monotonic()
        reason = "no answer"
        while time.monotonic() < began + seconds:
            healthy, reason = await self.health(timeout=10.0)
            if healthy:
                await self.learn()
                waited = time.monotonic() - began
                logs.get().info("engine ready", url=self.url, seconds=round(waited, 1))
                return
            await asyncio.sleep(0.25)
        raise EngineError(f"engine {self.url} was not ready after {seconds:.0f} s: {reason}")

    async def generate(
        self,
        rid: str,
        input_ids: list[int],
        sampling: Mapping[str, Any],
        *,
        cache: str = "",
        images: Sequence[Image] = (),
        on_part: OnPart | None = None,
    ) -> Generation:
        """Generate from token ids. An aborted request returns its tokens. Raises EngineError."""
        tokens = int(sampling.get("max_new_tokens", 0))
        parts = _PartReader(self, on_part) if on_part and self.sends_parts and not images else None
        try:
            body = self.body(rid, input_ids, sampling, cache)
            return await self._send(rid, body, tokens, images, parts)
        except (aiohttp.ClientError, OSError) as error:
            if not connections.has_ended(error) or (parts and parts.count):
                raise self._lost(error) from error
        # If only the answer was lost, the engine may still work on the request. The same name may
        # be refused, and a name that begins with it would be aborted with it.
        rid = f"again-{rid}"
        try:
            body = self.body(rid, input_ids, sampling, cache)
            return await self._send(rid, body, tokens, images, parts)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error

    async def leave(self) -> None:
        """Tell an engine of a pool that this job does not need it any more."""
        with contextlib.suppress(EngineError):
            await self.post(LEAVE)

    async def _send(
        self,
        rid: str,
        body: dict[str, Any],
        tokens: int,
        images: Sequence[Image],
        parts: _PartReader | None,
    ) -> Generation:
        """Send a request for up to `tokens`, once. Abort it if it is cancelled or too slow."""
        seconds = self._request_seconds + tokens / SLOWEST_TOKENS_A_SECOND
        try:
            async with asyncio.timeout(seconds):
                if parts:
                    status, text = await self.ask_by_parts(body, parts.read)
                else:
                    status, text = await self.ask(body, images)
            return self.read(status, text)
        except TimeoutError as error:
            self._abort_soon(rid)
            raise RequestTimeoutError(
                f"engine {self.url}: no answer after {seconds:.0f} s to a request for up to "
                f"{tokens} tokens"
            ) from error
        except (aiohttp.ClientError, OSError, asyncio.CancelledError):
            self._abort_soon(rid)
            raise

    async def ask(self, body: dict[str, Any], images: Sequence[Image] = ()) -> tuple[int, str]:
        """Return status and text of the answer to a request to generate.

        Raises what aiohttp raises, OSError, and PromptRefusedError for images if the engine takes
        none. The caller sets the deadline.
        """
        if images:
            raise PromptRefusedError(f"engine {self.url}: takes no images")
        return await self.post_to_generate(json=body)

    async def ask_by_parts(
        self, body: dict[str, Any], on_part: Callable[[str], None]
    ) -> tuple[int, str]:
        """Ask, and pass the text of each part of the answer on. Needs `sends_parts`."""
        raise NotImplementedError

    async def post_to_generate(self, **content: Any) -> tuple[int, str]:
        """Post content, as aiohttp names its forms; return status and text of the answer."""
        url, timeout = self.url + self.generate_path, aiohttp.ClientTimeout()
        async with self.session.post(url, timeout=timeout, **content) as answer:
            return answer.status, await answer.text()

    def _lost(self, error: Exception) -> EngineError:
        return EngineError(f"engine {self.url}: {type(error).__name__} {error}")

    def _abort_soon(self, rid: str) -> None:
        """Abort a request whose answer is not needed, without waiting for it."""
        self._aborts.add(abort := asyncio.create_task(self._try_abort(rid)))
        abort.add_done_callback(self._aborts.discard)

    async def _try_abort(self, rid: str) -> None:
        with contextlib.suppress(EngineError):
            await self.abort(rid)

    def request(
        self, method: str, path: str, seconds: float | None, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=seconds)
        return connections.request(
            self.session, method, self.url + path, timeout=timeout, **options
        )

    async def status(self, method: str, path: str, seconds: float | None, **options: Any) -> int:
        """Return the answer's status. Raises what aiohttp raises, TimeoutError and OSError."""
        async with self.request(method, path, seconds, **options) as answer:
            await answer.read()
            return answer.status

    async def post(self, path: str, body: Mapping[str, Any] | list[Any] | None = None) -> int:
        """Post a body and return the answer's status. Raises EngineError if there is no answer."""
        try:
            return await self.status("POST", path, POST_SECONDS, json=body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"engine {self.url}{path}: {type(error).__name__} {error}") from error

    async def get(self, path: str, seconds: float = GET_SECONDS) -> dict[str, Any]:
        """Return the JSON object at a path. Raises EngineError."""
        try:
            async with self.request("GET", path, seconds) as answer:
                if answer.status != 200:
                    reason = refusal_text(await answer.text())
                    raise EngineError(f"engine {self.url}{path} answered {answer.status}: {reason}")
                body: dict[str, Any] = await answer.json()
                return body
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"engine {self.url}{path}: {type(error).__name__} {error}") from error

    async def healthy(self, path: str, timeout: float, **options: Any) -> tuple[bool, str]:
        """Return (healthy, reason): healthy if a request to this path is answered by 200."""
        method = "POST" if options else "GET"
        try:
            status = await self.status(method, path, timeout, **options)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return False, f"{path}: {type(error).__name__} {error}"
        return status == 200, f"{path} answered {status}"


@dataclass(slots=True)
class _PartReader:
    """Reads the parts of an answer."""

    client: HttpClient
    on_part: OnPart
    count: int = 0

    def read(self, text: str) -> None:
        """Pass a part on. Raises EngineError if it is not one."""
        self.on_part(self.client.read(200, text))
        self.count += 1


def version_number(text: str) -> int:
    """Return a weight version as a number; -1 for the name of the engine's first weights."""
    return int(text) if text.isdigit() else UNKNOWN_VERSION


def refusal_text(text: str) -> str:
    """Return what a refusal says: its field `message`, or else its text."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
