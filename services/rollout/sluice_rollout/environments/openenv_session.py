"""A session with a server of OpenEnv (github.com/meta-pytorch/OpenEnv, openenv-core 0.3): one
environment of its own, over a WebSocket.

The protocol is small: {"type": "reset" | "step", "data": {...}} is answered by {"type":
"observation", "data": {"observation", "reward", "done"}} or {"type": "error", ...}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from sluice.runtime import error_summary
from sluice.samples.episode_protocol import MOST_BYTES

_FULL = {"CAPACITY_REACHED"}
_MODELS_FAULT = {"VALIDATION_ERROR", "EXECUTION_ERROR"}
"""Codes of errors that an action may bring about."""
_PAUSE_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_CLOSE_SECONDS = 5.0


class ServerError(Exception):
    """The server is not there, or does not do what it should. The message is for people."""


class UnreachableError(ServerError):
    """Nothing has taken a connection at the server's address."""


class RefusedActionError(Exception):
    """The environment cannot take an action. The message is for the model."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An answer of the environment. reward: of the action before it."""

    observation: dict[str, Any]
    reward: float = 0.0
    done: bool = False


@dataclass(slots=True)
class OpenEnvSession:
    """One episode's environment. seconds: of an answer."""

    socket: aiohttp.ClientWebSocketResponse
    seconds: float

    async def reset(self, options: dict[str, Any]) -> StepResult:
        """Begin an episode. Raises ServerError."""
        try:
            return _step(await self._asked("reset", options))
        except RefusedActionError as error:
            raise ServerError(f"it refuses to be reset with {options}: {error}") from error

    async def step(self, action: dict[str, Any]) -> StepResult:
        """Act. Raises RefusedActionError, or ServerError."""
        return _step(await self._asked("step", action))

    async def close(self) -> None:
        """Have the server end the session: once this is over, it has room for another one.

        A connection that is merely closed costs the server a traceback in its log: it closes the
        socket once more.
        """
        with contextlib.suppress(TimeoutError, ConnectionError):  # it has gone, or hangs
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.socket.send_json({"type": "close"})
                while not self.socket.closed:
                    await self.socket.receive()
        await self.socket.close()

    async def _asked(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.seconds):
                await self.socket.send_json({"type": kind, "data": data})
                message = await self.socket.receive()
        except TimeoutError:
            raise ServerError(f"no answer to {kind} in {self.seconds:g} s") from None
        except ConnectionError as error:
            raise ServerError(f"the connection broke at {kind}: {error}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ServerError(f"it closed the connection at {kind}")
        return _data(message.data)


class _FullError(Exception):
    """The server has as many sessions as it may."""


@contextlib.asynccontextmanager
async def open_session(
    url: str, seconds: float
) -> AsyncIterator[tuple[OpenEnvSession, dict[str, Any]]]:
    """A session, and the JSON schema of its actions. A server that is not there yet, or is full, is
    asked again for this long. Raises ServerError; UnreachableError where nothing is there.
    """
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as http, contextlib.AsyncExitStack() as held:
        end = time.monotonic() + seconds
        while True:
            try:
                schema = await _schema(http, url)
                socket = await http.ws_connect(f"{url}/ws", max_msg_size=MOST_BYTES)
                await _settled(socket)
                break
            except (aiohttp.ClientError, TimeoutError, _FullError) as error:
                if time.monotonic() > end:
                    raise _without(seconds, error) from error
                await asyncio.sleep(_PAUSE_SECONDS)
        session = OpenEnvSession(socket, seconds)
        held.push_async_callback(session.close)
        yield session, schema


async def is_listening(url: str) -> bool:
    """True where something still takes connections at this address."""
    timeout = aiohttp.ClientTimeout(total=_CONNECT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        try:
            async with http.get(f"{url}/health"):
                return True
        except aiohttp.ClientConnectionError:
            return False
        except TimeoutError:  # it is there, and busy
            return True


def _without(seconds: float, error: Exception) -> ServerError:
    """The error of a session that was not to be had in this time."""
    words = str(error) if isinstance(error, _FullError) else error_summary.named(error)
    absent = isinstance(error, aiohttp.ClientConnectionError)
    return (UnreachableError if absent else ServerError)(f"no session in {seconds:g} s: {words}")


async def _settled(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Raise _FullError where the server has no room for this session: it says so, and hangs up."""
    await socket.send_json({"type": "state"})
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise _FullError("it hung up")
    answer = json.loads(message.data)
    if answer.get("type") == "error" and answer.get("data", {}).get("code") in _FULL:
        await socket.close()
        raise _FullError(str(answer["data"].get("message")))


async def _schema(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(f"{url}/schema") as response:
        response.raise_for_status()
        schema: dict[str, Any] = (await response.json())["action"]
        return schema


def _data(text: str) -> dict[str, Any]:
    """The data of a message. Raises RefusedActionError, or ServerError."""
    try:
        answer = json.loads(text)
        kind, data = answer["type"], answer["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(f"it answered with no message of OpenEnv's: {text[:200]!r}") from error
    if kind != "error":
        return dict(data)
    words = str(data.get("message"))
    if data.get("errors"):
        words += f": {json.dumps(data['errors'], default=str)[:1000]}"
    if data.get("code") in _MODELS_FAULT:
        raise RefusedActionError(words)
    raise ServerError(f"{words} ({data.get('code')})")


def _step(data: dict[str, Any]) -> StepResult:
    try:
        return StepResult(
            data["observation"], float(data.get("reward") or 0.0), bool(data.get("done"))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"it answered with no observation: {error!r}") from error
