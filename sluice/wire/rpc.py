"""gRPC as the house uses it: keepalive, a token and a deadline on every call, TLS where the job asks for it, retries
while a peer restarts.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from sluice.wire import tls
from sluice.wire.tls import Tls

T = TypeVar("T")

TOKEN_ENV = "SLUICE_TOKEN"  # noqa: S105 - the name of the variable, not a token
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.so_reuseport", 0),
]
_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class DeadlineError(TimeoutError):
    """A wait ran out. The message says what it was waiting for."""


class RefusedError(Exception):
    """The peer answered with an error that no retry cures. The message says to what, and why."""


def job_token() -> str:
    """The job's token, from the environment; empty: calls are not authenticated."""
    return os.environ.get(TOKEN_ENV, "")


class _RequireToken(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call that does not carry the job's token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}"

        async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not carry this job's token")

        self._refuse = {
            (False, False): grpc.unary_unary_rpc_method_handler(refuse),
            (False, True): grpc.unary_stream_rpc_method_handler(refuse),
            (True, False): grpc.stream_unary_rpc_method_handler(refuse),
            (True, True): grpc.stream_stream_rpc_method_handler(refuse),
        }

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = next((str(v) for k, v in details.invocation_metadata if k == "authorization"), "")
        handler = await continuation(details)
        if handler is None or hmac.compare_digest(given, self._expected):
            return handler
        return self._refuse[handler.request_streaming, handler.response_streaming]


def server(token: str | None = None) -> grpc.aio.Server:
    """A server with our options. Add the servicer, bind, start."""
    token = job_token() if token is None else token
    interceptors = [_RequireToken(token)] if token else []
    return grpc.aio.server(options=_OPTIONS, interceptors=interceptors)


def bind(server_: grpc.aio.Server, address: str, secured: Tls | None = None) -> int:
    """Listen on host:port (port 0: a free one). Returns the port; OSError says so where the address is taken.

    secured: None: what the environment says.
    """
    secured = tls.from_environment() if secured is None else secured
    try:
        if secured:
            port = int(server_.add_secure_port(address, secured.of_server()))
        else:
            port = int(server_.add_insecure_port(address))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: it is taken or not ours ({error})") from error
    if port == 0:
        raise OSError(f"cannot listen on {address}: it is taken or not ours")
    return port


def channel(address: str, secured: Tls | None = None) -> grpc.aio.Channel:
    """secured: None: what the environment says."""
    secured = tls.from_environment() if secured is None else secured
    if not secured:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials, options = secured.of_channel()
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS + options)


def metadata(token: str | None = None) -> tuple[tuple[str, str], ...]:
    """What every call carries."""
    token = job_token() if token is None else token
    return (("authorization", f"Bearer {token}"),) if token else ()


def _hint(details: str | None) -> str:
    """A server with TLS just closes a connection in plain text."""
    plain = "Socket closed" in (details or "") and not tls.from_environment()
    return "; it may want TLS, which this process was not given" if plain else ""


async def retrying(call: Callable[[], Awaitable[T]], *, what: str, seconds: float) -> T:
    """Repeat a call while its peer is not there (it restarts), for at most `seconds`; then say what was waited for.

    Only calls that may be repeated: all of ours are idempotent. RefusedError where the peer is there and says no.
    """
    end = time.monotonic() + seconds
    pause = 0.1
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            foreign = tls.refusal(error.details())
            if foreign:
                raise RefusedError(f"{what}: {foreign}") from error
            if error.code() not in _RETRIED:
                raise RefusedError(f"{what}: {error.code().name}: {error.details()}") from error
            if time.monotonic() + pause > end:
                cause = f"{error.code().name}: {error.details()}{_hint(error.details())}"
                raise DeadlineError(f"{what}: no answer for {seconds:.0f} s ({cause})") from error
        await asyncio.sleep(pause)
        pause = min(pause * 2, 2.0)
