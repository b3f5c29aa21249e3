"""Sessions with a server of OpenEnv (github.com/meta-pytorch/OpenEnv, openenv-core 0.3).

A session is one environment behind a WebSocket. The client sends {"type": "reset" | "step",
"data": {...}}. The server answers {"type": "observation", "data": {"observation", "reward",
"done"}} or {"type": "error", ...}.
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

from sluice.input_checks import InputError, reward, shown
from sluice.runtime import error_summary
from sluice.samples.episode_protocol import MOST_BYTES

# Codes of errors: the server has no room for a session, and those that actions cause.
_FULL = "CAPACITY_REACHED"
_ACTION_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_PAUSE_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_CLOSE_SECONDS = 5.0


class ServerError(Exception):
    """The server cannot be reached or misbehaves. The message is for people."""


class UnreachableError(ServerError):
    """No connection was accepted at the server's address."""


class RefusedActionError(Exception):
    """The environment refuses an action. The message is for the model."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An answer of the environment, with the reward of the action before it."""

    observation: dict[str, Any]
    reward: float = 0.0
    done: bool = False


@dataclass(slots=True)
class OpenEnvSession:
    """A session with the environment of one episode."""

    socket: aiohttp.ClientWebSocketResponse
    seconds: float  # time limit of an answer

    async def reset(self, options: dict[str, Any]) -> StepResult:
        """Begin an episode. Raises ServerError."""
        try:
            return _step(await self._request("reset", options))
        except RefusedActionError as error:
            raise ServerError(f"the server refuses a reset with {options}: {error}") from error

    async def step(self, action: dict[str, Any]) -> StepResult:
        """Take an action. Raises RefusedActionError or ServerError."""
        return _step(await self._request("step", action))

    async def close(self) -> None:
        """End the session on the server, so that it has room for another one.

        If the connection were merely closed, the server would log a traceback, because it closes
        the socket a second time.
        """
        with contextlib.suppress(TimeoutError, ConnectionError):  # the server has ended or hangs
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.socket.send_json({"type": "close"})
                while not self.socket.closed:
                    await self.socket.receive()
        await self.socket.close()

    async def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.seconds):
                await self.socket.send_json({"type": kind, "data": data})
                message = await self.socket.receive()
        except TimeoutError:
            raise ServerError(f"no answer to {kind} in {self.seconds:g} s") from None
        except ConnectionError as error:
            raise ServerError(f"the connection broke at {kind}: {error}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ServerError(f"the server closed the connection at {kind}")
        return _data(message.data)


class _FullError(Exception):
    """The server has as many sessions as it may."""


@contextlib.asynccontextmanager
async def open_session(
    url: str, seconds: float
) -> AsyncIterator[tuple[OpenEnvSession, dict[str, Any]]]:
    """Open a session. Yields it with the JSON schema of its actions.

    Parameters
    ----------
    url
        Address of the server.
    seconds
        Time limit of an answer. A server that is starting or full is asked again for as long.

    Raises
    ------
    UnreachableError
        No connection was accepted.
    ServerError
        The server failed in another way.

    """
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as http, contextlib.AsyncExitStack() as held:
        end = time.monotonic() + seconds
        while True:
            try:
                schema = await _schema(http, url)
                socket = await http.ws_connect(f"{url}/ws", max_msg_size=MOST_BYTES)
                await _check_capacity(socket)
                break
            except (aiohttp.ClientError, TimeoutError, _FullError) as error:
                if time.monotonic() > end:
                    raise _no_session(seconds, error) from error
                await asyncio.sleep(_PAUSE_SECONDS)
        session = OpenEnvSession(socket, seconds)
        held.push_async_callback(session.close)
        yield session, schema


async def is_listening(url: str) -> bool:
    """True if the server still accepts connections."""
    timeout = aiohttp.ClientTimeout(total=_CONNECT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        try:
            async with http.get(f"{url}/health"):
                return True
        except aiohttp.ClientConnectionError:
            return False
        except TimeoutError:  # the server is busy
            return True


def _no_session(seconds: float, error: Exception) -> ServerError:
    """Make the error of a session that could not be opened in time."""
    words = str(error) if isinstance(error, _FullError) else error_summary.type_and_message(error)
    absent = isinstance(error, aiohttp.ClientConnectionError)
    return (UnreachableError if absent else ServerError)(f"no session in {seconds:g} s: {words}")


async def _check_capacity(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Raise _FullError if the server has no room for this session."""
    await socket.send_json({"type": "state"})
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise _FullError("it hung up")
    kind, data = _kind_and_data(message.data)
    if kind == "error" and data.get("code") == _FULL:
        await socket.close()
        raise _FullError(str(data.get("message")))


async def _schema(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(f"{url}/schema") as response:
        response.raise_for_status()
        schemas = _json(await response.text())
    schema = schemas.get("action") if isinstance(schemas, dict) else None
    if not isinstance(schema, dict):
        raise ServerError(f"{url}/schema: action: expected an object, found {shown(schema)}")
    return schema


def _json(text: str) -> Any:
    # NaN is read: an observation of numbers may have it, and becomes text for the model.
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"the server's answer is not JSON: {error}: {text[:200]!r}") from error


def _kind_and_data(text: str) -> tuple[str, dict[str, Any]]:
    """Return the type of a message and its data. Raises ServerError if it is none of OpenEnv's."""
    message = _json(text)
    data = message.get("data") if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise ServerError(f"the server's answer is not a message of OpenEnv: {shown(message)}")
    return str(message.get("type")), data


def _data(text: str) -> dict[str, Any]:
    """Return the data of a message. Raises RefusedActionError or ServerError."""
    kind, data = _kind_and_data(text)
    if kind != "error":
        return data
    words = str(data.get("message"))
    if data.get("errors"):
        words += f": {json.dumps(data['errors'], default=str)[:1000]}"
    if data.get("code") in _ACTION_ERRORS:
        raise RefusedActionError(words)
    raise ServerError(f"{words} ({data.get('code')})")


def _step(data: dict[str, Any]) -> StepResult:
    observation = data.get("observation")
    if not isinstance(observation, dict):
        raise ServerError(f"observation: expected an object, found {shown(observation)}")
    try:
        given = reward(data.get("reward") or 0.0)
    except InputError as error:
        raise ServerError(str(error)) from error
    return StepResult(observation, given, bool(data.get("done")))
