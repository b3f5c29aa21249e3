"""An HTTP proxy in front of a real server, which makes some of its answers fail.

    with FaultProxy(server.url) as proxy:
        proxy.faults.append(lambda request: Status(503) if request.number < 3 else None)

Headers travel unchanged, so signatures stay valid. It runs in threads: clients may block.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class ProxiedRequest:
    """number: of requests with this method and path so far, from 1."""

    method: str
    path: str
    number: int
    headers: dict[str, str]


@dataclass(frozen=True)
class Status:
    """Answered by the proxy; the server never hears of the request."""

    status: int
    body: bytes = b""


@dataclass(frozen=True)
class Silence:
    """No answer for so many seconds; then the connection ends."""

    seconds: float


@dataclass(frozen=True)
class Cut:
    """The connection ends after so many bytes of the answer's body; None: before the request."""

    after: int | None = None


Fault = Status | Silence | Cut
Rule = Callable[[ProxiedRequest], Fault | None]


@dataclass
class FaultProxy:
    """The first rule that has a fault decides; other requests are passed on."""

    target: str
    faults: list[Rule] = field(default_factory=list)
    requests: list[ProxiedRequest] = field(default_factory=list)

    def __enter__(self) -> FaultProxy:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def fault(self, method: str, path: str, headers: dict[str, str]) -> Fault | None:
        with self._lock:
            number = 1 + sum((r.method, r.path) == (method, path) for r in self.requests)
            request = ProxiedRequest(method, path, number, headers)
            self.requests.append(request)
        return next((fault for rule in self.faults if (fault := rule(request))), None)

    def wait(self, seconds: float) -> None:
        self._stopped.wait(seconds)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the client has gone
            self.close_connection = True

    def _serve(self) -> None:
        body = self._body()
        fault = self.proxy.fault(self.command, self.path, dict(self.headers.items()))
        if isinstance(fault, Status):
            self._respond(fault.status, [], fault.body)
        elif isinstance(fault, Silence):
            self.proxy.wait(fault.seconds)
            self._cut()
        elif isinstance(fault, Cut) and fault.after is None:
            self._cut()
        else:
            self._pass_on(body, fault.after if isinstance(fault, Cut) else None)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _body(self) -> bytes:
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            pieces = b""
            while size := int(line := self.rfile.readline().split(b";")[0], 16):
                pieces += line.rstrip(b"\r\n") + b"\r\n" + self.rfile.read(size + 2)
            while (trailer := self.rfile.readline()) not in (b"\r\n", b"\n", b""):
                pieces += trailer
            return pieces + b"0\r\n\r\n"
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _pass_on(self, body: bytes, limit: int | None) -> None:
        server = urlsplit(self.proxy.target)
        connection = http.client.HTTPConnection(server.hostname or "", server.port, timeout=120)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.putheader("Connection", "close")
            connection.endheaders(body or None)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        self._respond(answer.status, answer.getheaders(), content, limit)

    def _respond(
        self, status: int, headers: list[Any], content: bytes, limit: int | None = None
    ) -> None:
        self.send_response_only(status)
        length = None
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # a HEAD names a length without a body
            elif name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:limit])
        if limit is not None:
            self._cut()

    def _cut(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
