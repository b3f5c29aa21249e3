"""The gateway's HTTP: keys, bodies, errors in its clients' shape, whole answers and streams."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from sluice import input_checks
from sluice.api.groups.episode import OtherModel
from sluice.runtime import error_summary
from sluice.samples.episode_protocol import MOST_BYTES
from sluice_rollout import failures, metrics
from sluice_rollout.gateway import chat, completions, door, large, messages, responses, sglang_api
from sluice_rollout.gateway.agent_session import Reply, Seat
from sluice_rollout.gateway.errors import GatewayError, invalid, no_such_model, unavailable
from sluice_rollout.gateway.exchange import Answer, Request
from sluice_rollout.gateway.external_models import Other
from sluice_rollout.gateway.keys import Keys

LOOPBACK = "127.0.0.1"
_MESSAGES = "/v1/messages"
_BODY = web.RequestKey("body", dict[str, Any])
_BODY_SECONDS = 60.0
_BACKLOG = 1024  # programs that connect at once
_OUTCOMES = {401: "key", 499: "gone", 500: "failed", 503: "unavailable"}
Events = Iterator[dict[str, Any]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Visit:
    """The stay of an episode's seat. context: of its group's task, which asks the engine."""

    seat: Seat
    context: contextvars.Context
    tasks: set[asyncio.Task[Reply]] = field(default_factory=set)

    async def reply(self, request: Request) -> Reply:
        """The model's turn. Raises GatewayError, also where the episode ends meanwhile."""
        task = asyncio.create_task(self.seat.reply(request), context=self.context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the client has gone
            raise unavailable("the episode has ended") from None

    def end(self) -> None:
        for task in self.tasks:
            task.cancel()


Visits = Mapping[str, Visit]
"""Those of an episode, by the names of its seats; one without a name where the job has none."""


@dataclass(slots=True)
class Server:
    """The endpoint of all episodes of a worker.

    model: the name that it lists. host, port: where it listens; on any free port where none is
    set. join: takes in an episode's pod, by its path. models: those that programs may ask besides;
    their keys are in `variables`.
    """

    model: str
    host: str = LOOPBACK
    port: int = 0
    join: tuple[str, Handler] | None = None
    models: Sequence[OtherModel] = ()
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)
    keys: Keys[Visits] = field(default_factory=Keys)
    _runner: web.AppRunner | None = None
    _listening: asyncio.Server | None = None
    _door: door.Door | None = None
    _others: dict[str, Other] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """For programs beside the worker."""
        return f"http://{LOOPBACK}:{self.port}/v1"

    async def start(self) -> None:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[_in_openai_shape])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_post("/v1/chat/completions", self._or_other(self._chat))
        app.router.add_post("/v1/completions", self._or_other(self._completions))
        app.router.add_post("/v1/responses", self._or_other(self._responses))
        app.router.add_post(_MESSAGES, self._or_other(self._messages))
        app.router.add_post("/generate", self._generate)
        app.on_response_prepare.append(self._admit_welcome)
        if self.join:
            app.router.add_get(*self.join)
        self._others = {model.name: Other.of(model, self.variables) for model in self.models}
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await self._runner.setup()
        assert self._runner.server  # there is one after `setup`
        make, loop = self._runner.server, asyncio.get_running_loop()
        self._door = door.Door(make, lambda: len(self.keys), door.SECONDS)
        self._listening = await loop.create_server(
            self._door, self.host, self.port, backlog=_BACKLOG
        )
        self.port = self._listening.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._listening:
            self._listening.close()
        if self._runner:
            await self._runner.cleanup()
        for other in self._others.values():
            await other.close()

    def _or_other(self, handler: Handler) -> Handler:
        """The handler; or another model's server, where the request names that."""

        async def asked(request: web.Request) -> web.StreamResponse:
            if not self._others:
                return await handler(request)
            visits, body = self._visits(request), await _body(request)
            other = self._others.get(str(body.get("model")))
            if other is None:
                return await handler(request)
            with next(iter(visits.values())).seat.episode.clock.at_engine():
                return await other.forward(request, body)

        return asked

    async def _models(self, request: web.Request) -> web.StreamResponse:
        seats = [name for name in self._visits(request) if name]
        model = {"object": "model", "created": 0, "owned_by": "sluice"}
        if "name" in request.match_info:
            return web.json_response(model | {"id": request.match_info["name"]})
        names = [*(seats or [self.model]), *self._others]
        return web.json_response(
            {"object": "list", "data": [model | {"id": name} for name in names]}
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        visit, body = await self._opened(request)
        return await _answered(request, visit, body, chat.read(body), chat.write, chat.stream)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        visit, body = await self._opened(request)
        asked = completions.read(body)
        return await _answered(request, visit, body, asked, completions.write, completions.stream)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        visit, body = await self._opened(request)
        asked = messages.read(body, visit.seat.arguments)
        return await _answered(request, visit, body, asked, messages.write, messages.stream)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        visit, body = await self._opened(request)
        asked = sglang_api.read(body)
        return await _answered(request, visit, body, asked, sglang_api.write, sglang_api.stream)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        visit, body = await self._opened(request)
        histories = visit.seat.responses
        asked = responses.read(body, histories)

        def write(answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
            whole = responses.write(answer, body)
            histories[whole["id"]] = [*asked.messages, answer.message]
            return whole

        def stream(answer: Answer, body: dict[str, Any]) -> Events:
            return responses.stream(write(answer, body))

        return await _answered(request, visit, body, asked, write, stream)

    def _visits(self, request: web.Request) -> Visits:
        """The visits that the request's key opens; Anthropic's clients have a header of their own
        for it.
        """
        name = request.headers.get("x-api-key") if request.path == _MESSAGES else None
        header = f"Bearer {name}" if name else request.headers.get("Authorization")
        visits = self.keys.check(header)
        self._admit(request)
        return visits

    async def _admit_welcome(self, request: web.Request, response: web.StreamResponse) -> None:
        """Admit a connection whose request is not refused, such as a pod's that joins."""
        if response.status < 400:
            self._admit(request)

    def _admit(self, request: web.Request) -> None:
        if self._door:
            self._door.admit(request.protocol)

    async def _opened(self, request: web.Request) -> tuple[Visit, dict[str, Any]]:
        """The visit of a request, by the model that it names where there are seats, and its body;
        without a key nothing of that is read.
        """
        visits = self._visits(request)
        body = await _body(request)
        name = "" if "" in visits else body.get("model")
        if name not in visits:
            raise no_such_model(str(name), [*visits, *self._others])
        return visits[str(name)], body


async def _body(request: web.Request) -> dict[str, Any]:
    """The body of a request, read once. Raises GatewayError."""
    if _BODY not in request:
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                text = await request.text()
            body = await large.run(len(text), input_checks.load_json, text, "body")
        except (ValueError, LookupError, web.RequestPayloadError) as error:
            raise invalid(f"the body is no JSON that can be taken: {error}") from error
        except TimeoutError:
            raise GatewayError(408, f"no whole body came in {_BODY_SECONDS:g} s") from None
        if not isinstance(body, dict):
            raise invalid("the body: expected a JSON object")
        if not isinstance(body.get("model"), str | None):
            raise invalid("model: expected a text", "model")
        request[_BODY] = body
    return request[_BODY]


async def _answered(
    request: web.Request,
    visit: Visit,
    body: dict[str, Any],
    asked: Request,
    write: Callable[[Answer, dict[str, Any]], dict[str, Any]],
    stream: Callable[[Answer, dict[str, Any]], Events],
) -> web.StreamResponse:
    """Ask the model, and send what it says. A turn is its client's once it has been sent."""
    start = time.monotonic()
    reply = await visit.reply(asked)
    try:
        if body.get("stream"):
            response = await _streamed(request, stream(reply.answer, body))
        else:
            response = web.json_response(write(reply.answer, body))
            await response.prepare(request)
        await response.write_eof()
    except (ConnectionError, asyncio.CancelledError):
        reply.turn.answered = False
        raise
    metrics.GATEWAY_OVERHEAD.observe(time.monotonic() - start - reply.engine_seconds)
    return response


async def _streamed(request: web.Request, events: Events) -> web.StreamResponse:
    """Server-sent events: those of responses and of Anthropic's messages have names, the others an
    end.
    """
    whole = [*events]  # what fails here is still a refusal, and no broken stream
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    named = False
    for event in whole:
        named = "type" in event
        name = f"event: {event['type']}\n" if named else ""
        await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
    if not named:
        await response.write(b"data: [DONE]\n\n")
    return response


@web.middleware
async def _in_openai_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as OpenAI's clients read them; all requests counted."""
    resource = request.match_info.route.resource
    endpoint = resource.canonical.removeprefix("/v1/") if resource else "unknown"
    status = 499  # the client has gone
    try:
        response = await handler(request)
        status = response.status
    except GatewayError as error:
        status, response = error.status, _refusal(error, request.path)
    except web.HTTPException as error:
        status = error.status
        refusal = GatewayError(status, f"{request.path}: {error.reason}")
        response = _refusal(refusal, request.path)
    except Exception as error:  # one request's mishap is told to its client, and harms no other
        failures.LOG.note("a request at the gateway failed", error)
        refusal = GatewayError(500, error_summary.cause(error), "server_error")
        status, response = 500, _refusal(refusal, request.path)
    finally:
        outcome = "ok" if status < 400 else _OUTCOMES.get(status, "refused")
        metrics.GATEWAY_REQUESTS.labels(endpoint=endpoint, outcome=outcome).inc()
    return response


def _refusal(error: GatewayError, path: str) -> web.Response:
    """Clients try again by themselves, unless they are told that it is of no use."""
    retry = {"x-should-retry": "true" if error.retry else "false"}
    body = error.body | ({"type": "error"} if path == _MESSAGES else {})
    return web.json_response(body, status=error.status, headers=retry)
