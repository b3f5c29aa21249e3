"""Errors of stores, each in one sentence that a user can act on.

Clients raise errors of a dozen libraries. `explained` tells them apart by class name, code and HTTP
status, because none of the libraries has to be installed. Nothing of a request is repeated:
addresses and headers may hold credentials.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from sluice.uri import Uri, UriError

Kind = Literal[
    "package", "credential", "clock", "missing", "exists", "full", "busy", "slow", "cut", "other"
]
# A later attempt can succeed without any change by the user.
TRANSIENT: frozenset[Kind] = frozenset({"busy", "slow", "cut"})

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or workload identity",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, or workload identity",
    "hf": "HF_TOKEN",
}
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "hf": "HF_ENDPOINT", "gs": "STORAGE_EMULATOR_HOST"}

_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
_REFUSED = {
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "AccessDenied",
    "PermissionError",
    "ClientAuthenticationError",
    "RefreshError",
    "401",
    "403",
}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "507"}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_EXISTS = {"FileExistsError", "PreconditionFailed", "ConditionalRequestConflict", "412"}
_BUSY = {"SlowDown", "ServiceUnavailable", "InternalError", "429", "500", "502", "503", "504"}
_SLOW = {
    "TimeoutError",
    "FSTimeoutError",
    "ReadTimeoutError",
    "ConnectTimeoutError",
    "RequestTimeout",
    "ServerTimeoutError",
    "TimeoutException",
    "ServiceResponseTimeoutError",
}
_CUT = {
    "ConnectionError",
    "EndpointConnectionError",
    "ConnectionClosedError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "IncompleteReadError",
    "IncompleteBody",
    "ResponseStreamingError",
    "ResponseParserError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ServerDisconnectedError",
    "TransportError",
    "ServiceRequestError",
    "ServiceResponseError",
}
_MISSING = {"FileNotFoundError", "EntryNotFoundError", "ResourceNotFoundError", "NoSuchKey", "404"}
# Errors of the calling program.
_MISTAKES = (AssertionError, AttributeError, NameError, TypeError)


class StoreError(RuntimeError):
    """An operation on a store failed.

    Attributes
    ----------
    kind
        What went wrong: `package` is missing, `credential` is refused or missing, `clock` of this
        machine is off, object or bucket is `missing`, object `exists` already, the store is `full`,
        `busy` (HTTP 429 and 5xx), `slow` (no answer in time), or the connection was `cut`.

    """

    def __init__(self, message: str, kind: Kind = "other") -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def transient(self) -> bool:
        """Whether the same operation may succeed later."""
        return self.kind in TRANSIENT


@contextmanager
def store_errors(uri: Uri) -> Iterator[None]:
    """Raise errors of a store's client as StoreError.

    Errors of this machine's disk, and mistakes of a program, are raised as they are.
    """
    try:
        yield
    except (StoreError, UriError, *_MISTAKES):
        raise
    except Exception as error:
        if _of_this_machine(error):
            raise
        raise explained(error, uri) from error


def explained(error: BaseException, uri: Uri) -> StoreError:
    """Return an error of a client as a sentence that names the URI and what to do."""
    facts = _facts(error)
    hub = _hub_error(facts, uri) if uri.scheme == "hf" else None
    return hub or _error_of(facts, error, uri)


def endpoint(uri: Uri) -> str:
    """Return the server that a URI is read from, without credentials."""
    variable = _ENDPOINTS.get(uri.scheme, "")
    set_to = os.environ.get(variable) or (
        os.environ.get("AWS_ENDPOINT_URL_S3") if uri.scheme == "s3" else None
    )
    if not set_to:
        return {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure", "hf": "the hub"}.get(
            uri.scheme, uri.bucket
        )
    # Some variables hold a bare `host:port`.
    parts = urlsplit(set_to if "://" in set_to else f"//{set_to}")
    return parts.netloc.rpartition("@")[2]


@dataclass(frozen=True, slots=True)
class _Facts:
    """Class names, codes and statuses of an error and of its causes."""

    words: frozenset[str]

    def any(self, words: set[str]) -> bool:
        return not self.words.isdisjoint(words)


def _error_of(facts: _Facts, error: BaseException, uri: Uri) -> StoreError:
    server = endpoint(uri)
    credentials = CREDENTIALS.get(uri.scheme, "credentials")
    rules: list[tuple[bool, Kind, str]] = [
        (
            facts.any({"RequestTimeTooSkewed"}),
            "clock",
            f"{server} refuses the request because the clock of this machine is off; set the clock",
        ),
        (
            facts.any(_NO_CREDENTIALS) or _no_account(error) or _found_none(facts),
            "credential",
            f"found no credentials for {server}; set {credentials}",
        ),
        (
            facts.any(_NO_BUCKET) or _is_upload_to_no_bucket(error, uri),
            "missing",
            f"{server} has no {'container' if uri.scheme == 'az' else 'bucket'} {uri.bucket}",
        ),
        (facts.any(_FULL), "full", f"{server} has no space left: its quota is used up"),
        (
            facts.any(_REFUSED) or _is_forbidden(error),
            "credential",
            f"{server} refuses the credentials{_code(facts)}: check {credentials}, and that they "
            f"may use {uri.bucket}",
        ),
        (facts.any(_EXISTS), "exists", "exists already"),
        (
            facts.any(_SLOW),
            "slow",
            f"{server} did not answer in time; set SLUICE_STORE_TIMEOUT_SECONDS higher for a slow "
            "store",
        ),
        (facts.any(_BUSY), "busy", f"{server} is overloaded or failing{_code(facts)}"),
        # Before the next: fsspec reports a connection that cannot be made as a missing file.
        (facts.any(_CUT), "cut", f"no connection to {server}, or it was cut"),
        (facts.any(_MISSING), "missing", f"there is nothing of this name at {server}"),
    ]
    for holds, kind, sentence in rules:
        if holds:
            return StoreError(f"{uri}: {sentence}", kind)
    return StoreError(f"{uri}: {server}: {type(error).__name__}{_code(facts)}")


def _hub_error(facts: _Facts, uri: Uri) -> StoreError | None:
    base = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if facts.any({"GatedRepoError"}):
        return StoreError(
            f"{uri}: the repository is gated: accept its terms at {_shown(base)}/{uri.bucket}, and "
            "set HF_TOKEN to a token of the account that did",
            "credential",
        )
    if facts.any({"OfflineModeIsEnabled", "LocalEntryNotFoundError"}) and offline():
        return StoreError(
            f"{uri}: not in the hub's cache of this machine, and HF_HUB_OFFLINE is set; fetch it "
            "on a machine with a network (sluice models pull), and copy HF_HOME",
            "missing",
        )
    if facts.any({"RevisionNotFoundError"}):
        return StoreError(f"{uri}: the repository has no revision {uri.revision}", "missing")
    if facts.any({"RepositoryNotFoundError"}):
        return StoreError(
            f"{uri}: {endpoint(uri)} has no such repository, or it is private: check the name, or "
            "set HF_TOKEN",
            "credential" if facts.any({"401", "403"}) else "missing",
        )
    return None


def offline() -> bool:
    """Whether HF_HUB_OFFLINE tells to ask no hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _shown(address: str) -> str:
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _facts(error: BaseException) -> _Facts:
    return _Facts(frozenset(word for cause in _causes(error) for word in _words(cause)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _words(error: BaseException) -> Iterator[str]:
    yield from (base.__name__ for base in type(error).__mro__)
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        yield str(response.get("Error", {}).get("Code"))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    for holder in (error, response):  # httpx and requests, aiohttp, gcsfs, azure
        for name in ("status_code", "status", "code", "error_code"):
            if isinstance(value := getattr(holder, name, None), int | str):
                yield str(getattr(value, "value", value))  # Azure's codes are an enumeration


def _code(facts: _Facts) -> str:
    """Return the store's own word for the error, in brackets, if there is one."""
    codes = [word for word in facts.words & (_REFUSED | _BUSY) if not word.endswith("Error")]
    named = [word for word in codes if not word.isdigit()] or codes
    return f" ({min(named)})" if named else ""


def _no_account(error: BaseException) -> bool:
    # adlfs and azure-storage raise a plain ValueError.
    return isinstance(error, ValueError) and "account_name" in str(error)


def _found_none(facts: _Facts) -> bool:
    # Azure's client asks every source of credentials; only an answer of one has a status.
    asked = facts.any({"ClientAuthenticationError"})
    return asked and not any(word.isdigit() for word in facts.words)


def _is_forbidden(error: BaseException) -> bool:
    # gcsfs keeps of the status 403 only this word.
    return type(error) is OSError and str(error).startswith("Forbidden: ")


def _is_upload_to_no_bucket(error: BaseException, uri: Uri) -> bool:
    # gcsfs keeps of the status 404 only the address: an upload names an object that is to be made.
    missing = isinstance(error, FileNotFoundError) and uri.scheme == "gs"
    return missing and "/upload/storage/" in str(error)


def _of_this_machine(error: BaseException) -> bool:
    """Tell whether an error is of a local file, such as a full disk while an object is fetched."""
    if not isinstance(error, OSError) or _is_remote(error):
        return False
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    return full or (isinstance(error.filename, str) and os.path.isabs(error.filename))


def _is_remote(error: BaseException) -> bool:
    return any(getattr(cause, "response", None) is not None for cause in _causes(error))
