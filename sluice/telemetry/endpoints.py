"""HTTP for the kubelet and for Prometheus, on threads of its own: /healthz, /readyz, /metrics, and
what a process shows besides.

/healthz says whether the process should be restarted, /readyz whether it does its work. Both answer
in words, so that `curl` explains what `kubectl` only counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    disable_created_metrics,
    make_wsgi_app,
)

from sluice.runtime.pod_env import Environment

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# Why not, in words; empty: all is healthy. Called from any thread.
HealthCheck = Callable[[], str]
# A page of plain text. Raises OSError. Called from any thread.
Page = Callable[[], bytes]
_TEXT = ("Content-Type", "text/plain; charset=utf-8")

PATIENCE_SECONDS = 60.0


def healthy() -> str:
    return ""


class LoopWatchdog:
    """The pulse of an event loop, which stops where the loop does: a process whose loop is stuck
    listens, and answers nobody.
    """

    def __init__(
        self, patience: float = PATIENCE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._patience, self._clock = patience, clock
        self._last = clock()

    def beat(self) -> None:
        self._last = self._clock()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Beats for as long as the loop runs."""
        task = asyncio.create_task(self._beat(), name="pulse")
        try:
            yield
        finally:
            task.cancel()

    async def _beat(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(1.0)

    def check(self) -> str:
        silent = self._clock() - self._last
        return (
            f"the event loop has been stuck for {silent:.0f} s" if silent > self._patience else ""
        )


def serve(
    env: Environment,
    *,
    ready: HealthCheck,
    alive: HealthCheck = healthy,
    registry: CollectorRegistry = REGISTRY,
    pages: Mapping[str, Page] | None = None,
) -> Callable[[], None]:
    """Serve on the container's port `metrics`, if it has one,
    until the returned function is called.
    """
    if not env.variables.get("SLUICE_PORT_METRICS"):
        return lambda: None
    _, close = listen(
        env.port("metrics"), env.bind, ready=ready, alive=alive, registry=registry, pages=pages
    )
    return close


def listen(
    port: int,
    bind: str,
    *,
    ready: HealthCheck,
    alive: HealthCheck = healthy,
    registry: CollectorRegistry = REGISTRY,
    pages: Mapping[str, Page] | None = None,
) -> tuple[int, Callable[[], None]]:
    """(port, close). port 0: a free one. pages: more of them, by path."""
    disable_created_metrics()  # type: ignore[no-untyped-call] # they would double the series
    checks = {"/healthz": alive, "/readyz": ready}
    app = _app(make_wsgi_app(registry), checks, pages or {})
    server = make_server(bind, port, app, server_class=_Server, handler_class=_QuietHandler)
    Thread(target=server.serve_forever, name="endpoints", daemon=True).start()

    def close() -> None:
        server.shutdown()
        server.server_close()

    return server.server_port, close


def _app(
    metrics: WSGIApplication, checks: Mapping[str, HealthCheck], pages: Mapping[str, Page]
) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return metrics(environ, start)
        if path in pages:
            try:
                text = pages[path]()
            except OSError as error:
                start("502 Bad Gateway", [_TEXT])
                return [f"{error}\n".encode()]
            start("200 OK", [_TEXT])
            return [text]
        check = checks.get(path)
        why = check() if check else "not found: /healthz, /readyz and /metrics are"
        code = "404 Not Found" if check is None else "503 Service Unavailable" if why else "200 OK"
        start(code, [_TEXT])
        return [f"{why or 'ok'}\n".encode()]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without the base's look-up of our own name in DNS, which may take its time."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """A kubelet asks every few seconds."""
