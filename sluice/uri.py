"""Addresses of models, data and checkpoints.

A string with `scheme://` is a URI. `file://` and everything else is a path of this machine.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

Scheme = Literal["hf", "s3", "gs", "az", "https", "http"]
# `hub`: repositories with revisions; `bucket`: objects that can be written; `web`: files to read.
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "wasbs": "az"}
# Types of repositories of the hub besides models, as they are written in a URI.
_HUB_TYPES = {"datasets": "dataset", "spaces": "space"}
_HUB_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_HUB_ID = re.compile(rf"^{_HUB_NAME}/{_HUB_NAME}$")
_BUCKET = re.compile(r"^[A-Za-z0-9$][A-Za-z0-9._-]{1,221}$")
_WRITABLE = ("s3", "gs", "az")
_WILDCARDS = frozenset("*?[")


class UriError(ValueError):
    """A string that looks like a URI, but names no place."""


@dataclass(frozen=True, slots=True)
class Uri:
    """A place that is not on this machine.

    Attributes
    ----------
    bucket
        Bucket or container; `org/name` of the hub; host, with port, of a web server.
    key
        Path in it, without a slash at its ends; empty for the whole bucket or repository.
    revision
        Branch, tag or commit of a repository of the hub; None: its main branch.
    repo_type
        Type of a repository of the hub.

    """

    scheme: Scheme
    bucket: str
    key: str = ""
    revision: str | None = None
    repo_type: Literal["model", "dataset", "space"] = "model"

    def __str__(self) -> str:
        kind = {"dataset": "datasets/", "space": "spaces/"}.get(self.repo_type, "")
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.scheme}://{kind}{self.bucket}{revision}" + f"/{self.key}" * bool(self.key)

    @property
    def path(self) -> str:
        """Path as the filesystem of this URI takes it (`filesystem`)."""
        if self.scheme in _WRITABLE:
            return f"{self.bucket}/{self.key}".rstrip("/")
        text = str(self)
        return text.removeprefix("hf://") if self.scheme == "hf" else text

    @property
    def name(self) -> str:
        """Last part of the path."""
        return (self.key or self.bucket).rpartition("/")[2]

    @property
    def writable(self) -> bool:
        """Whether checkpoints can be kept there."""
        return self.scheme in _WRITABLE

    def __truediv__(self, part: str) -> Uri:
        return replace(self, key=f"{self.key}/{part}".strip("/"))


def is_uri(text: str) -> bool:
    """Tell whether a string begins with `scheme://`. It may still be no valid URI."""
    return _SCHEME.match(text) is not None


def parse_uri(text: str) -> Uri | None:
    """Return the URI that a string is, or None if it is a path (see `local_path`).

    Raises
    ------
    UriError
        The scheme is unknown, or a part of the URI is missing or wrong.

    """
    match = _SCHEME.match(text)
    if match is None:
        return None
    scheme, rest = match[1].lower(), text[match.end() :]
    if scheme == "file":
        local_path(text)
        return None
    if scheme not in get_args(Scheme):
        cure = (
            f"write {_ALIASES[scheme]}://"
            if scheme in _ALIASES
            else "expected "
            + ", ".join(f"{name}://" for name in ("hf", "s3", "gs", "az", "https", "file"))
        )
        raise UriError(f"{scheme}:// is not a scheme that sluice reads: {cure}, or a path")
    if "\\" in rest or not rest.isprintable():
        raise UriError(f"{scheme}://: a URI has no backslashes and no control characters")
    if scheme == "hf":
        return _hub_uri(rest)
    return _web_uri(scheme, text) if scheme in ("https", "http") else _bucket_uri(scheme, rest)


def is_pattern(uri: Uri) -> bool:
    """Tell whether the path of a URI has wildcards."""
    return uri.scheme != "hf" and not _WILDCARDS.isdisjoint(uri.key)


def local_name(uri: Uri) -> str:
    """Return the name of the files' directory: it names the model in metrics, so it is the URI's.

    A file of data keeps its ending.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", uri.name).strip("._")[-100:] or "files"
    # A directory of several files must not look like one of them.
    return name.replace(".", "_") if is_pattern(uri) or "*" in uri.key else name


def digest(uri: Uri) -> str:
    """Return a short name that tells URIs apart."""
    return hashlib.blake2b(str(uri).encode(), digest_size=6).hexdigest()


def link_of(uri: Uri, directory: str) -> str:
    """Return the path of the link by which a job's pods find what was fetched for a URI."""
    return f"{directory}/{digest(uri)}/{local_name(uri)}"


def local_path(text: str) -> str:
    """Return the path of a `file://` URI; other strings as they are."""
    match = _SCHEME.match(text)
    if match is None or match[1].lower() != "file":
        return text
    host, slash, path = text[match.end() :].partition("/")
    if host not in ("", "localhost") or not slash:
        raise UriError(f"{text}: expected an absolute path after file://, such as file:///models/x")
    return unquote(f"/{path}")


def hub_id(text: str) -> Uri | None:
    """Return the repository of the hub if a string has the form `org/name`, else None.

    The caller has to see first whether there is a directory of that name.
    """
    return Uri("hf", text) if _HUB_ID.match(text) and ".." not in text else None


def _hub_uri(rest: str) -> Uri:
    kind, _, after = rest.partition("/")
    repo_type = _HUB_TYPES.get(kind, "model")
    if repo_type != "model" or kind == "models":
        rest = after
    # A revision may contain slashes if they are written %2F, as the hub's own URIs have them.
    organization, _, after = rest.partition("/")
    repository, _, key = after.partition("/")
    name, at, revision = repository.partition("@")
    repo_id = f"{organization}/{name}"
    if not _HUB_ID.match(repo_id) or ".." in repo_id:
        raise UriError(
            f"hf://{rest}: expected hf://org/name, hf://org/name@revision, or "
            "hf://datasets/org/name/file for a file of a data set"
        )
    if at and not revision:
        raise UriError(f"hf://{rest}: expected a branch, tag or commit after @")
    return Uri("hf", repo_id, _key(f"hf://{rest}", key), unquote(revision) or None, repo_type)  # type: ignore[arg-type]


def _bucket_uri(scheme: str, rest: str) -> Uri:
    bucket, _, key = rest.partition("/")
    if "@" in bucket:
        raise UriError(
            f"{scheme}://: a URI with a user or a key in it would be written into logs; give "
            "credentials by the environment (docs/stores.md)"
        )
    if not _BUCKET.match(bucket):
        what = "container" if scheme == "az" else "bucket"
        raise UriError(
            f"{scheme}://{rest}: expected {scheme}://{what}/path, with a {what} name of letters, "
            "digits, dots and dashes"
        )
    return Uri(scheme, bucket, _key(f"{scheme}://{rest}", key))  # type: ignore[arg-type]


def _web_uri(scheme: str, text: str) -> Uri:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UriError(f"{scheme}://: not a valid address: {error}") from error
    shown = f"{scheme}://{host}{parts.path}"
    if parts.username is not None or parts.query or parts.fragment:
        raise UriError(
            f"{shown}: an address with a user, a query (?...) or a fragment (#...) may hold a "
            "credential, which would be written into logs: take that part out"
        )
    key = parts.path.strip("/")
    if not host or not key:
        raise UriError(f"{shown}: expected the address of a file, such as https://host/rows.jsonl")
    return Uri(scheme, parts.netloc, _key(shown, key))  # type: ignore[arg-type]


def _key(shown: str, key: str) -> str:
    key = key.rstrip("/")
    if any(part in ("", ".", "..") for part in key.split("/") if key):
        raise UriError(f"{shown}: the path has an empty part, `.` or `..`")
    return key
