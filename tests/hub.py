"""A server of the Hugging Face hub's HTTP API, as `huggingface_hub` uses it.

    with Hub({"org/name": Repository({"main": {"config.json": b"{}"}})}) as hub:
        os.environ["HF_ENDPOINT"] = hub.url

Repositories have revisions with commits, may be private or gated, and serve files in ranges.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]
TOKEN = "hf_of_the_tests"


@dataclass
class Repository:
    """Files by revision. access: who may read it, with the token or at all."""

    revisions: dict[str, Files]
    access: Literal["public", "private", "gated"] = "public"
    kind: Literal["models", "datasets"] = "models"

    def commit(self, revision: str) -> str | None:
        """The commit of a branch, a tag or a commit."""
        commits = {
            hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest(): name
            for name, files in self.revisions.items()
        }
        by_name = {name: commit for commit, name in commits.items()}
        return revision if revision in commits else by_name.get(revision)

    def files(self, commit: str) -> Files:
        return next(files for name, files in self.revisions.items() if self.commit(name) == commit)


@dataclass
class Hub:
    """The running server. cuts: answers that end after so many bytes, one for each entry."""

    repositories: dict[str, Repository]
    cuts: list[int] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __enter__(self) -> Hub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if path.startswith("api/") and path.count("/") >= 3:
            kind, organization, name, *rest = path.removeprefix("api/").split("/", 3)
            repository = self._repository(kind, f"{organization}/{name}")
            if repository is not None:
                self._describe(f"{organization}/{name}", repository, "".join(rest).split("/"))
            return
        kind = "models"
        if path.startswith("datasets/"):
            kind, path = "datasets", path.removeprefix("datasets/")
        name, _, rest_of_path = path.partition("/resolve/")
        repository = self._repository(kind, name)
        if repository is None:
            return
        revision, _, file = rest_of_path.partition("/")
        commit = repository.commit(revision)
        if commit is None:
            self._error(404, "RevisionNotFound")
        elif (content := repository.files(commit).get(file)) is None:
            self._error(404, "EntryNotFound")
        else:
            self._file(commit, content)

    do_GET = do_HEAD = _serve

    def _repository(self, kind: str, name: str) -> Repository | None:
        """The repository, if the client may read it; else the answer is sent."""
        repository = self.hub.repositories.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or repository.kind != kind:
            self._error(404, "RepoNotFound")
        elif repository.access == "gated" and not allowed:
            self._error(403, "GatedRepo")
        elif repository.access == "private" and not allowed:
            self._error(401, "RepoNotFound")
        else:
            return repository
        return None

    def _describe(self, name: str, repository: Repository, rest: list[str]) -> None:
        revision = "/".join(rest[1:]) if rest[:1] == ["revision"] else "main"
        commit = repository.commit(revision)
        if rest[:1] == ["tree"]:
            commit = repository.commit(rest[1])
        if commit is None:
            self._error(404, "RevisionNotFound")
            return
        files = repository.files(commit)
        if rest[:1] == ["tree"]:
            self._json([_tree_entry(path, content) for path, content in files.items()])
            return
        siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
        self._json({"id": name, "sha": commit, "siblings": siblings, "private": False})

    def _file(self, commit: str, content: bytes) -> None:
        total = len(content)
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        body = content[start:]
        self.send_response_only(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cuts and len(body) > self.hub.cuts[0]:
            self.wfile.write(body[: self.hub.cuts.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode())

    def _error(self, status: int, code: str) -> None:
        self._send(status, b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": "no"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _tree_entry(path: str, content: bytes) -> dict[str, object]:
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": oid}
