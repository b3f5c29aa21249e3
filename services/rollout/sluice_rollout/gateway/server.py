"""The gateway's HTTP server: routes, keys, bodies, answers, streams and errors."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from sluice import input_checks
from sluice.api.groups.episode import OtherModel
from sluice.runtime import error_summary
from sluice.samples.episode_protocol import MOST_BYTES
from sluice.telemetry import failure_log
from sluice.wire.http_relay import relay
from sluice_rollout import metrics
from sluice_rollout.gateway import access, large_requests
from sluice_rollout.gateway.access import ConnectionLimiter, EpisodeKeys
from sluice_rollout.gateway.agent_session import AuthenticatedSession, Reply
from sluice_rollout.gateway.interfaces import chat, completions, messages, responses, sglang_api
from sluice_rollout.gateway.interfaces.errors import (
    GatewayError,
    invalid,
    no_such_model,
)
from sluice_rollout.gateway.interfaces.exchange import Answer, TurnRequest
from sluice_rollout.gateway.interfaces.streaming import AnswerEvents, Event

LOOPBACK = "127.0.0.1"
_MESSAGES = "/v1/messages"
_BODY = web.RequestKey("body", dict[str, Any])
_SIZE = web.RequestKey("size", int)
# The error that has ended a stream, whose status is 200.
_STREAM_ERROR = web.RequestKey("stream_error", GatewayError)
_BODY_SECONDS = 60.0
_BACKLOG = 1024  # programs that connect at once
_OUTCOMES = {401: "key", 499: "gone", 500: "failed", 503: "unavailable"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The sessions of an episode, by seat. Without `rollout.seats`, the only seat is "".
Sessions = Mapping[str, AuthenticatedSession]


@dataclass(frozen=True, slots=True)
class ExternalModel:
    """A model other than the policy that episodes may ask (`rollout.models`): a judge, an opponent.

    Requests go to its server unchanged, except for the name and the key. Its answers are neither
    kept nor trained.
    """

    model: OtherModel
    key: str  # empty: its server does not ask for a key
    session: aiohttp.ClientSession

    @classmethod
    def connect(cls, model: OtherModel, variables: Mapping[str, str]) -> ExternalModel:
        """Open a session with the model's server. Call this while an event loop runs."""
        timeout = aiohttp.ClientTimeout(total=model.timeout_seconds, sock_connect=10)
        session = aiohttp.ClientSession(timeout=timeout)
        return cls(model, variables.get(model.key_variable, ""), session)

    async def close(self) -> None:
        await self.session.close()

    async def forward(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        """Relay a request to the model's server. Raises GatewayError if it does not answer."""
        path = request.path.removeprefix("/v1")
        forwarded = {**body, "model": self.model.model or self.model.name}
        headers = {"Authorization": f"Bearer {self.key}", "x-api-key": self.key} if self.key else {}
        start = time.monotonic()
        try:
            return await relay(
                self.session, request, f"{self.model.url.rstrip('/')}{path}", headers,
                json.dumps(forwarded).encode(),
            )  # fmt: skip
        except (aiohttp.ClientError, TimeoutError) as error:
            text = f"model {self.model.name} at {self.model.url} does not answer: {error!r}"
            raise GatewayError(502, text, "server_error", "unavailable", retry=True) from error
        finally:
            seconds = time.monotonic() - start
            metrics.GATEWAY_OTHER_SECONDS.labels(model=self.model.name).observe(seconds)


@dataclass(slots=True)
class Server:
    """The HTTP server for all episodes of a worker.

    Parameters
    ----------
    model
        Name of the policy in the list of models.
    host, port
        Address to listen at. Port 0 takes any free port.
    join
        Path and handler for episode pods that join the worker.
    models
        Other models that programs may ask. Their keys are in `variables`.

    """

    model: str
    host: str = LOOPBACK
    port: int = 0
    join: tuple[str, Handler] | None = None
    models: Sequence[OtherModel] = ()
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)
    keys: EpisodeKeys[Sessions] = field(default_factory=EpisodeKeys)
    _runner: web.AppRunner | None = None
    _listening: asyncio.Server | None = None
    _limiter: ConnectionLimiter | None = None
    _external_models: dict[str, ExternalModel] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """Address for programs on this machine."""
        return f"http://{LOOPBACK}:{self.port}/v1"

    async def start(self) -> None:
        """Listen for requests."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[_handle_errors])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_post("/v1/chat/completions", self._or_external_model(self._chat))
        app.router.add_post("/v1/completions", self._or_external_model(self._completions))
        app.router.add_post("/v1/responses", self._or_external_model(self._responses))
        app.router.add_post(_MESSAGES, self._or_external_model(self._messages))
        app.router.add_post("/generate", self._generate)
        app.on_response_prepare.append(self._keep_accepted)
        if self.join:
            app.router.add_get(*self.join)
        self._external_models = {
            model.name: ExternalModel.connect(model, self.variables) for model in self.models
        }
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await self._runner.setup()
        assert self._runner.server
        make, loop = self._runner.server, asyncio.get_running_loop()
        self._limiter = ConnectionLimiter(
            make, lambda: len(self.keys), access.UNAUTHENTICATED_SECONDS
        )
        self._listening = await loop.create_server(
            self._limiter, self.host, self.port, backlog=_BACKLOG
        )
        self.port = self._listening.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._listening:
            self._listening.close()
        if self._runner:
            await self._runner.cleanup()
        for external_model in self._external_models.values():
            await external_model.close()

    def _or_external_model(self, handler: Handler) -> Handler:
        """Wrap a handler: requests that name an external model go to that model's server."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if not self._external_models:
                return await handler(request)
            sessions, body = self._sessions(request), await _body(request)
            external_model = self._external_models.get(str(body.get("model")))
            if external_model is None:
                return await handler(request)
            with next(iter(sessions.values())).agent.episode.time_limit.at_engine():
                return await external_model.forward(request, body)

        return handle

    async def _models(self, request: web.Request) -> web.StreamResponse:
        seats = [name for name in self._sessions(request) if name]
        model = {"object": "model", "created": 0, "owned_by": "sluice"}
        if "name" in request.match_info:
            return web.json_response(model | {"id": request.match_info["name"]})
        names = [*(seats or [self.model]), *self._external_models]
        return web.json_response(
            {"object": "list", "data": [model | {"id": name} for name in names]}
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, body = await self._session(request)
        turn_request = await _read(request, session, partial(chat.read, body))
        if body.get("stream"):
            return await _stream(request, session, turn_request, chat.Events(body))
        return await _answer(request, session, turn_request, partial(chat.write, body=body))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session, body = await self._session(request)
        turn_request = completions.read(body)
        if body.get("stream"):
            return await _stream(request, session, turn_request, completions.Events(body))
        return await _answer(request, session, turn_request, partial(completions.write, body=body))

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        session, body = await self._session(request)
        read = partial(messages.read, body, session.agent.tool_arguments)
        turn_request = await _read(request, session, read)
        if body.get("stream"):
            return await _stream(request, session, turn_request, messages.Events(body))
        return await _answer(request, session, turn_request, partial(messages.write, body=body))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        session, body = await self._session(request)
        write = partial(sglang_api.write, body=body)
        return await _answer(request, session, sglang_api.read(body), write)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        session, body = await self._session(request)
        histories = session.agent.response_histories
        turn_request = await _read(request, session, partial(responses.read, body, histories))

        def remember(response_id: str, answer: Answer) -> None:
            histories[response_id] = [*turn_request.messages, answer.message]

        if body.get("stream"):
            events = responses.Events(body)
            return await _stream(
                request, session, turn_request, events, partial(remember, events.id)
            )

        def write(answer: Answer) -> dict[str, Any]:
            whole = responses.write(answer, body)
            remember(whole["id"], answer)
            return whole

        return await _answer(request, session, turn_request, write)

    def _sessions(self, request: web.Request) -> Sessions:
        """Return the sessions that the request's key opens. Raises GatewayError."""
        # Anthropic's clients send the key in x-api-key.
        key = request.headers.get("x-api-key") if request.path == _MESSAGES else None
        header = f"Bearer {key}" if key else request.headers.get("Authorization")
        sessions = self.keys.check(header)
        self._keep_connection(request)
        return sessions

    async def _keep_accepted(self, request: web.Request, response: web.StreamResponse) -> None:
        """Keep a connection whose request is accepted, such as that of a pod that joins."""
        if response.status < 400:
            self._keep_connection(request)

    def _keep_connection(self, request: web.Request) -> None:
        if self._limiter:
            self._limiter.keep(request.protocol)

    async def _session(self, request: web.Request) -> tuple[AuthenticatedSession, dict[str, Any]]:
        """Return the session and the body of a request. Raises GatewayError.

        If the job has seats, the request's `model` names the session's seat.
        """
        sessions = self._sessions(request)  # checks the key before the body is read
        body = await _body(request)
        name = "" if "" in sessions else body.get("model")
        if name not in sessions:
            raise no_such_model(str(name), [*sessions, *self._external_models])
        return sessions[str(name)], body


async def _body(request: web.Request) -> dict[str, Any]:
    """Return a request's body, which is read only once. Raises GatewayError."""
    if _BODY not in request:
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                text = await request.text()
            request[_SIZE] = len(text)
            body = await large_requests.run(len(text), input_checks.load_json, text, "body")
        except (ValueError, LookupError, web.RequestPayloadError) as error:
            raise invalid(f"the body is not valid JSON: {error}") from error
        except TimeoutError:
            raise GatewayError(408, f"the body did not arrive within {_BODY_SECONDS:g} s") from None
        if not isinstance(body, dict):
            raise invalid("the body: expected a JSON object")
        if not isinstance(body.get("model"), str | None):
            raise invalid("model: expected a text", "model")
        request[_BODY] = body
    return request[_BODY]


async def _read(
    request: web.Request, session: AuthenticatedSession, read: Callable[[], TurnRequest]
) -> TurnRequest:
    """Read the messages of a request, and their images. Raises GatewayError."""
    turn_request = await large_requests.run(request[_SIZE], read)
    return await session.agent.images.admit(turn_request)


async def _answer(
    request: web.Request,
    session: AuthenticatedSession,
    turn_request: TurnRequest,
    write: Callable[[Answer], dict[str, Any]],
) -> web.StreamResponse:
    """Ask the model and send its answer. A turn counts as answered once it has been sent."""
    start = time.monotonic()
    reply = await session.reply(turn_request)
    try:
        response = web.json_response(write(reply.answer))
        await response.prepare(request)
        await response.write_eof()
    except (ConnectionError, asyncio.CancelledError):
        reply.turn.answered = False
        raise
    _observe_overhead(start, reply)
    return response


async def _stream(
    request: web.Request,
    session: AuthenticatedSession,
    turn_request: TurnRequest,
    events: AnswerEvents,
    on_answer: Callable[[Answer], None] = lambda _: None,
) -> web.StreamResponse:
    """Ask the model and send its answer as events, while it comes.

    A refusal before the first text is an HTTP status, and an error after it is an event.
    """
    start = time.monotonic()
    turn = session.agent.stream(turn_request)
    replying = asyncio.create_task(session.reply(turn_request, turn))
    replying.add_done_callback(lambda _: turn.close())
    sender = EventSender(request)
    try:
        async for text in turn.texts():
            if not sender.has_begun:
                await sender.send(events.begin(turn.prompt_tokens))
            await sender.send(events.text(text))
        reply = await replying
        on_answer(reply.answer)
        if not sender.has_begun:
            await sender.send(events.begin(turn.prompt_tokens))
        await sender.send(events.end(reply.answer))
        await sender.end()
    except (ConnectionError, asyncio.CancelledError):
        await _take_back(replying)
        raise
    except Exception as error:
        if not sender.has_begun:
            raise
        request[_STREAM_ERROR] = _gateway_error(error)
        await sender.send(events.fail(request[_STREAM_ERROR]))
        await sender.end()
    else:
        _observe_overhead(start, reply)
    return sender.response


async def _take_back(replying: asyncio.Task[Reply]) -> None:
    """Cancel a turn whose client has disconnected; if it is finished, it is not answered."""
    replying.cancel()
    await asyncio.wait({replying})
    if not replying.cancelled() and not replying.exception():
        replying.result().turn.answered = False


def _observe_overhead(start: float, reply: Reply) -> None:
    metrics.GATEWAY_OVERHEAD.observe(time.monotonic() - start - reply.engine_seconds)


@dataclass(slots=True)
class EventSender:
    """Sends server-sent events.

    Events with a `type` (responses, messages) are named. A stream of events without one (chat,
    completions) ends with `[DONE]`.
    """

    request: web.Request
    response: web.StreamResponse = field(
        default_factory=lambda: web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    )
    has_begun: bool = False
    _named: bool = False

    async def send(self, events: Iterator[Event]) -> None:
        """Send events in one write. Raises ConnectionError if the client has left."""
        # An error here becomes a refusal; after `prepare` it would break the stream.
        lines = "".join(map(self._line, events)).encode()
        if not self.has_begun:
            await self.response.prepare(self.request)
            self.has_begun = True
        if lines:
            await self.response.write(lines)

    async def end(self) -> None:
        if not self._named:
            await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    def _line(self, event: Event) -> str:
        self._named = "type" in event
        name = f"event: {event['type']}\n" if self._named else ""
        return f"{name}data: {json.dumps(event)}\n\n"


@web.middleware
async def _handle_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into answers that clients of OpenAI understand, and count all requests."""
    resource = request.match_info.route.resource
    endpoint = resource.canonical.removeprefix("/v1/") if resource else "unknown"
    status = 499  # the client has disconnected
    try:
        response = await handler(request)
        status = request.get(_STREAM_ERROR, response).status
    except web.HTTPException as error:
        status = error.status
        refusal = GatewayError(status, f"{request.path}: {error.reason}")
        response = _refusal(refusal, request.path)
    except Exception as error:  # must not affect other requests
        refusal = _gateway_error(error)
        status, response = refusal.status, _refusal(refusal, request.path)
    finally:
        outcome = "ok" if status < 400 else _OUTCOMES.get(status, "refused")
        metrics.GATEWAY_REQUESTS.labels(endpoint=endpoint, outcome=outcome).inc()
    return response


def _gateway_error(error: Exception) -> GatewayError:
    """Return an error as clients understand it, and log one that is not meant for them."""
    if isinstance(error, GatewayError):
        return error
    failure_log.LOG.note("a request at the gateway failed", error)
    return GatewayError(500, error_summary.cause(error), "server_error")


def _refusal(error: GatewayError, path: str) -> web.Response:
    # Clients retry by default. This header tells them if it is of any use.
    retry = {"x-should-retry": "true" if error.retry else "false"}
    body = error.body | ({"type": "error"} if path == _MESSAGES else {})
    return web.json_response(body, status=error.status, headers=retry)
