"""A collector of traces: OTLP over HTTP, as OpenTelemetry's protocol has it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Span:
    """began, ended: seconds since the epoch. links: span ids."""

    service: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    began: float
    ended: float
    attributes: dict[str, Any]
    links: tuple[bytes, ...]

    def trace_root(self, spans: Iterable[Span]) -> bytes:
        """Id of the span without a parent above it."""
        return next(s.span_id for s in spans if s.trace_id == self.trace_id and not s.parent_id)


class Receiver:
    """Listens on a free port while it is open."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                receiver.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Do not mix the server's log with the output of the tests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Receiver:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spans(request: ExportTraceServiceRequest) -> list[Span]:
    return [
        Span(
            _attributes(resource.resource.attributes)["service.name"],
            span.name,
            span.trace_id,
            span.span_id,
            span.parent_span_id,
            span.start_time_unix_nano / 1e9,
            span.end_time_unix_nano / 1e9,
            _attributes(span.attributes),
            tuple(link.span_id for link in span.links),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
