"""gRPC with the settings of sluice: keepalive, authentication, deadlines, TLS, retries.

Every call carries a token, the protocol's number and a deadline. Calls are repeated while a peer
restarts.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from sluice.telemetry import tracing
from sluice.wire import protocol, tls
from sluice.wire.protocol import MixedReleasesError
from sluice.wire.tls import Tls

T = TypeVar("T")

TOKEN_ENV = "SLUICE_TOKEN"  # noqa: S105 - the name of the variable, not a token
_OPTIONS = [
    ("grpc.max_receive_message_length", 6256 << 10),
    ("grpc.max_send_message_length", 6256 << 10),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
]
# The peer is away or stops: it cancels calls that it has not begun. Cancelling by this process
# raises CancelledError.
_RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
# Details that gRPC makes up if the peer ends a call that is still being sent. The peer's answer is
# lost; the next try gets it.
_ENDED_WHILE_SENDING = "Internal error from Core"

_TAKEN = "the address is in use, or belongs to another machine"


class DeadlineError(TimeoutError):
    """The wait is over. The message says what it was for."""


class SilentPeerError(Exception):
    """The peer began an answer and does not continue it. The message says for how long."""


class RefusedError(Exception):
    """The peer answered with an error that no retry cures. The message has call and reason."""


def job_token() -> str:
    """Return the job's token from the environment; empty if calls are not authenticated."""
    return os.environ.get(TOKEN_ENV, "")


def run_name() -> str:
    """Return a name of this run of the job, which tells nothing about its token."""
    return hashlib.sha256(job_token().encode()).hexdigest()[:12]


class _CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the job's token, and calls of another protocol."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}" if token else ""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        token = next((str(v) for k, v in details.invocation_metadata if k == "authorization"), "")
        if self._expected and not hmac.compare_digest(token, self._expected):
            text = "the call does not carry this job's token"
            return _refusing(handler, grpc.StatusCode.UNAUTHENTICATED, text)
        if text := protocol.refusal(details.invocation_metadata):
            code = grpc.StatusCode.FAILED_PRECONDITION
            return _refusing(handler, code, text, protocol.call_metadata())
        return handler


class _TracingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Opens a span for each unary call whose caller has one."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        parent = tracing.caller_context(details.invocation_metadata)
        if parent is None or handler is None or handler.unary_unary is None:
            return handler
        name = details.method.rpartition("/")[2]

        async def serve(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with tracing.span(name, parent=parent):
                return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            serve, handler.request_deserializer, handler.response_serializer
        )


def _refusing(
    handler: Any, code: grpc.StatusCode, text: str, trailing: protocol.Metadata = ()
) -> grpc.RpcMethodHandler:
    """Return a handler of the same kind that refuses the call before it reads the request."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, text, trailing)

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[handler.request_streaming, handler.response_streaming](refuse)


def server(token: str | None = None) -> grpc.aio.Server:
    """Return a server with the common options. The caller adds a servicer, binds, starts it."""
    token = job_token() if token is None else token
    interceptors = [_CallGuard(token), *([_TracingInterceptor()] if tracing.enabled() else [])]
    return grpc.aio.server(options=_OPTIONS, interceptors=interceptors)


def bind(server_: grpc.aio.Server, address: str, secured: Tls | None = None) -> int:
    """Listen on host:port, and return the port.

    Parameters
    ----------
    server_
        Server to bind.
    address
        host:port; port 0 takes a free one.
    secured
        TLS material; None takes it from the environment.

    Raises
    ------
    OSError
        If the address is taken, or belongs to another machine.

    """
    secured = tls.from_environment() if secured is None else secured
    try:
        if secured:
            port = int(server_.add_secure_port(address, secured.server_credentials()))
        else:
            port = int(server_.add_insecure_port(address))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {_TAKEN} ({error})") from error
    if port == 0:
        raise OSError(f"cannot listen on {address}: {_TAKEN}")
    return port


def channel(address: str, secured: Tls | None = None) -> grpc.aio.Channel:
    """Open a channel, with TLS as `secured` or the environment says."""
    secured = tls.from_environment() if secured is None else secured
    if not secured:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials, options = secured.channel_credentials()
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS + options)


def metadata(token: str | None = None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that every call carries."""
    token = job_token() if token is None else token
    authorization = (("authorization", f"Bearer {token}"),) if token else ()
    return authorization + protocol.call_metadata() + tracing.outgoing_metadata()


def _hint(details: str | None) -> str:
    """Return a hint at TLS: a server with TLS just closes a connection in plain text."""
    plain = "Socket closed" in (details or "") and not tls.from_environment()
    return "; it may require TLS, for which this process has no certificate" if plain else ""


def refused(what: str, error: grpc.aio.AioRpcError) -> RefusedError | MixedReleasesError:
    """Return the error for an answer that no retry changes."""
    if protocol.is_refusal(error.trailing_metadata()):
        return MixedReleasesError(f"{what}: {error.details()}")
    return RefusedError(f"{what}: {error.code().name}: {error.details()}")


async def retrying(call: Callable[[], Awaitable[T]], *, what: str, seconds: float) -> T:
    """Repeat a call for at most `seconds` while its peer restarts.

    Only for calls that may be repeated; all calls of sluice are idempotent.

    Raises
    ------
    DeadlineError
        If the peer has not answered in time.
    RefusedError
        If the peer refuses the call.
    MixedReleasesError
        If the peer refuses it because of its release.

    """
    end = time.monotonic() + seconds
    pause = 0.1
    while True:
        try:
            return await call()
        except SilentPeerError as error:
            if time.monotonic() + pause > end:
                raise DeadlineError(f"{what}: no answer for {seconds:.0f} s ({error})") from error
        except grpc.aio.AioRpcError as error:
            foreign = tls.refusal(error.details())
            if foreign:
                raise RefusedError(f"{what}: {foreign}") from error
            if error.code() not in _RETRIED and error.details() != _ENDED_WHILE_SENDING:
                raise refused(what, error) from error
            if time.monotonic() + pause > end:
                cause = f"{error.code().name}: {error.details()}{_hint(error.details())}"
                raise DeadlineError(f"{what}: no answer for {seconds:.0f} s ({cause})") from error
        await asyncio.sleep(pause)
        pause = min(pause * 2, 2.0)
