"""The HTTP calls of the server: requests to generate, and those of a weight update."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sluice.engines.plugin_common import transfer
from sluice.engines.plugin_common.attempt_fence import HEADER, Attempts
from sluice.engines.transformers.server.batch import Batch
from sluice.engines.transformers.server.model import ServedModel
from sluice.engines.transformers.server.sampling import RefusedError, SamplingParameters

_LARGEST_BODY = 1 << 28
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Handlers of one model's requests."""

    def __init__(self, model: ServedModel, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self._groups: dict[str, Any] = {}
        self._attempts = Attempts()

    def application(self) -> web.Application:
        app = web.Application(
            client_max_size=_LARGEST_BODY, middlewares=[self._fenced, self._explained]
        )
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/info", self.info),
                web.get("/metrics", self.metrics),
                web.post("/generate", self.generate),
                web.post("/abort_request", self.abort),
                web.post("/log_probs", self.log_probs),
                web.post("/decode", self.decode),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.post("/join", self.join),
                web.post("/begin", self.begin),
                web.post("/receive", self.receive),
                web.post("/end", self.end),
                web.post("/load", self.load),
                web.post("/version", self.name_version),
            ]
        )
        app.cleanup_ctx.append(self._generating)
        return app

    async def _generating(self, _: web.Application) -> AsyncIterator[None]:
        """Compute tokens while the application runs."""
        thread = threading.Thread(target=self.batch.run, name="generate", daemon=True)
        thread.start()
        yield
        self.batch.stop()
        self.batch.abort(lambda _: True)
        await asyncio.to_thread(thread.join, 10.0)

    @web.middleware
    async def _fenced(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse the calls of a trainer that was replaced."""
        source = request.headers.get(HEADER.decode())
        if source and (refusal := self._attempts.refusal(source.encode("latin-1"))):
            return _refused(refusal, 409)
        return await handler(request)

    @web.middleware
    async def _explained(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer with the reason if a request cannot be done."""
        try:
            return await handler(request)
        except (KeyError, TypeError, ValueError) as error:
            named = "" if isinstance(error, RefusedError) else f"{type(error).__name__}: "
            return _refused(f"{named}{error}", 400)
        except web.HTTPException:
            raise
        except Exception as error:  # whatever a model's code or a collective raises
            return _refused(f"{type(error).__name__}: {error}", 500)

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": self.model.version,
                "context_tokens": self.model.context_tokens,
                "paused_seconds": self.batch.paused_seconds,
                "running": self.batch.running,
                "waiting": self.batch.waiting,
            }
        )

    async def metrics(self, _: web.Request) -> web.Response:
        registry = CollectorRegistry()
        registry.register(self)
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    def collect(self) -> list[Metric]:
        """Return the metrics: prometheus_client's protocol of a collector."""
        batch, prefix = self.batch, "sluice_engine"
        tokens = CounterMetricFamily(f"{prefix}_generated_tokens", "Tokens of responses.")
        tokens.add_metric([], batch.generated_tokens)
        requests = GaugeMetricFamily(
            f"{prefix}_requests", "Requests at the engine.", labels=["state"]
        )
        requests.add_metric(["running"], batch.running)
        requests.add_metric(["waiting"], batch.waiting)
        return [tokens, requests]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = [int(token) for token in body["input_ids"]]
        parameters = SamplingParameters.read(body["sampling"])
        if unknown := self.model.unknown_ids((*prompt, *parameters.stop_token_ids)):
            raise RefusedError(
                f"token id {unknown[0]}: expected 0 to {self.model.vocabulary - 1}, the ids of the "
                "model's embedding"
            )
        if not 0 < len(prompt) < self.model.context_tokens:
            raise RefusedError(
                f"input_ids: {len(prompt)} tokens, expected at least one and fewer than the "
                f"model's context of {self.model.context_tokens}"
            )
        asked = self.batch.add(str(body["rid"]), prompt, parameters)
        return web.json_response(await asyncio.wrap_future(asked.answer))

    async def abort(self, request: web.Request) -> web.Response:
        rid = (await request.json()).get("rid")
        self.batch.abort(lambda asked: rid is None or asked.rid == rid)
        return web.json_response({})

    async def log_probs(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens, count = [int(token) for token in body["tokens"]], int(body["count"])
        if self.model.unknown_ids(tokens) or not 0 < count < len(tokens):
            raise RefusedError(
                f"tokens: expected ids from 0 to {self.model.vocabulary - 1}, and a count of 1 to "
                f"{len(tokens) - 1}"
            )

        def score() -> list[float]:
            with self.batch.weights:
                return self.model.log_probs(tokens, count)

        return web.json_response({"log_probs": await asyncio.to_thread(score)})

    async def decode(self, request: web.Request) -> web.Response:
        return web.json_response({"text": self.model.decode((await request.json())["tokens"])})

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await request.json())["mode"]
        await asyncio.to_thread(self.batch.pause, mode)
        return web.json_response({})

    async def resume(self, _: web.Request) -> web.Response:
        self.batch.resume()
        return web.json_response({})

    async def join(self, request: web.Request) -> web.Response:
        """Join a communicator with a trainer, whose rank is 0, in place of any older one."""
        body = await request.json()
        older, self._groups = self._groups, {}
        self._groups[body["group"]] = await asyncio.to_thread(
            transfer.join,
            body["group"],
            body["host"],
            body["port"],
            1,
            body["world_size"],
            body["backend"],
            body["seconds"],
        )
        for group in older.values():
            transfer.release(group)
        return web.json_response({})

    async def begin(self, _: web.Request) -> web.Response:
        self.model.begin()
        return web.json_response({})

    async def receive(self, request: web.Request) -> web.Response:
        """Take part in the broadcast of one bucket, and load it."""
        body = await request.json()
        if body["group"] not in self._groups:
            raise ValueError(f"the engine is not in the communicator {body['group']}")
        group = self._groups[body["group"]]

        def take() -> None:
            names, dtypes, shapes = body["names"], body["dtypes"], body["shapes"]
            with self.batch.weights:
                received = transfer.receive(names, dtypes, shapes, group, self.model.device)
                self.model.take(received)
                if self.model.device.type == "cuda":
                    torch.cuda.synchronize(self.model.device)

        await asyncio.to_thread(take)
        return web.json_response({})

    async def end(self, request: web.Request) -> web.Response:
        version = (await request.json())["version"]

        def end() -> None:
            with self.batch.weights:
                self.model.end()
                if version is not None:
                    self.model.version = version

        await asyncio.to_thread(end)
        return web.json_response({})

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()

        def load() -> None:
            with self.batch.weights:
                self.model.load(Path(body["path"]))
                self.model.version = body["version"]

        await asyncio.to_thread(load)
        return web.json_response({})

    async def name_version(self, request: web.Request) -> web.Response:
        self.model.version = (await request.json())["version"]
        return web.json_response({})


def _refused(reason: str, status: int) -> web.Response:
    return web.json_response({"message": reason}, status=status)
