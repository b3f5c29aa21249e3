"""HTTP endpoints for the kubelet and Prometheus: /healthz, /readyz, /metrics and further pages.

/healthz says whether the process should be restarted, /readyz whether it does its work. Both answer
in words, so that `curl` explains what `kubectl` only counts. The server runs on its own threads and
answers while the process is busy.
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

# Returns why a check fails, in words; empty if it passes. Called from any thread.
HealthCheck = Callable[[], str]
# Returns a page of plain text, or raises OSError. Called from any thread.
Page = Callable[[], bytes]
_TEXT = ("Content-Type", "text/plain; charset=utf-8")

PATIENCE_SECONDS = 60.0


def healthy() -> str:
    """Return "": the health check of a process that is healthy as long as it answers."""
    return ""


class LoopWatchdog:
    """Detects an event loop that no longer runs.

    The endpoints run on their own threads, so a process with a stuck loop still listens. The
    watchdog makes its health check fail.

    Parameters
    ----------
    patience
        Seconds without a beat after which the loop counts as stuck.
    clock
        Monotonic time in seconds.

    """

    def __init__(
        self, patience: float = PATIENCE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._patience, self._clock = patience, clock
        self._last = clock()

    def beat(self) -> None:
        """Record that the loop runs now."""
        self._last = self._clock()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Beat once a second until the block ends."""
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
        """Return why the process is unhealthy; empty if the loop runs."""
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
    """Serve on the container's port `metrics`, if it has one. Returns a function that stops it."""
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
    """Start the server on a thread.

    Parameters
    ----------
    port
        TCP port; 0 picks a free one.
    bind
        Address to listen on.
    ready, alive
        Checks behind /readyz and /healthz.
    registry
        Metrics behind /metrics.
    pages
        Further pages by path.

    Returns
    -------
    The port, and a function that stops the server.

    """
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
        why = check() if check else "not found; try /healthz, /readyz or /metrics"
        code = "404 Not Found" if check is None else "503 Service Unavailable" if why else "200 OK"
        start(code, [_TEXT])
        return [f"{why or 'ok'}\n".encode()]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without the base class's DNS look-up of the host name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log nothing: a kubelet sends a request every few seconds."""
