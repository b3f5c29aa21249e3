"""The filesystem of a URI: fsspec's, with time limits and without cached listings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from sluice.runtime.extras import install_command
from sluice.stores.errors import StoreError, store_errors
from sluice.uri import Scheme, Uri

# Seconds in which a connection must be made.
CONNECT_SECONDS = 10.0
# Attempts of a request. s3fs repeats those whose connection was cut as often as its client has.
ATTEMPTS = 3
CUT_ATTEMPTS = 2
TIMEOUT_VARIABLE = "SLUICE_STORE_TIMEOUT_SECONDS"
# Package of the client, and the extra of the distribution that has it.
_CLIENTS: Mapping[Scheme, tuple[str, str]] = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
}


def filesystem(uri: Uri) -> Any:
    """Return the filesystem (an fsspec.AbstractFileSystem) of a URI, which takes `uri.path`.

    Calls of it belong into `store_errors`. A request ends after a few attempts of
    `answer_seconds()` each. Listings are not cached, so that changes by others are seen. The
    instance is shared by calls of this process; a forked process gets another.

    Raises
    ------
    StoreError
        The client is not installed, or finds no credentials.

    """
    import fsspec

    options = _OPTIONS[uri.scheme]() | {"use_listings_cache": False}
    protocol = "https" if uri.scheme == "http" else uri.scheme
    with store_errors(uri):
        try:
            opened = fsspec.filesystem(protocol, **options)
        except ImportError as error:
            package, extra = _CLIENTS.get(uri.scheme, ("aiohttp", "rollout"))
            raise StoreError(
                f"{uri}: {uri.scheme}:// needs {package}: {install_command(extra)}",
                "package",
            ) from error
    if uri.scheme == "s3":
        opened.retries = CUT_ATTEMPTS
        _limit_uploads(uri, opened)
    return opened


def objects_below(uri: Uri) -> Mapping[str, Mapping[str, Any]]:
    """Return what a store says of the object of a URI, or of all below it, by path.

    Calls belong into `store_errors`.
    """
    fs = filesystem(uri)
    found: Any = fs.find(uri.path, detail=True)
    # adlfs returns names alone if the URI is that of an object, or of none.
    return found if isinstance(found, dict) else {path: fs.info(path) for path in found}


def _limit_uploads(uri: Uri, opened: Any) -> None:
    """Send uploads without `Expect: 100-continue`.

    aiohttp stops its timer at the interim answer: an upload to a store that falls silent after it
    would never end.
    """
    from botocore.handlers import add_expect_header

    with store_errors(uri):
        opened.s3.meta.events.unregister("before-call.s3", add_expect_header)


def answer_seconds() -> float:
    """Return for how long a store may be silent: SLUICE_STORE_TIMEOUT_SECONDS, or 30."""
    text = os.environ.get(TIMEOUT_VARIABLE, "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise StoreError(f"{TIMEOUT_VARIABLE}: expected seconds, such as 30, found {text!r}")
    return seconds


def _s3() -> dict[str, Any]:
    # Some stores answer a read of a range with the checksum of the whole object, which botocore
    # would take for damage.
    variable = "AWS_RESPONSE_CHECKSUM_VALIDATION"
    return {
        # botocore reads it too; as an option, another endpoint is another instance.
        "endpoint_url": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        "config_kwargs": {
            "response_checksum_validation": os.environ.get(variable, "when_required"),
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": answer_seconds(),
            "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        },
    }


def _gcs() -> dict[str, Any]:
    # gcsfs asks a second API, by gRPC, for the kind of each bucket, and warns if it may not. Only
    # buckets with a hierarchical namespace need that.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    _silence("gcsfs")
    key_file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if key_file and not os.path.isfile(key_file):  # gcsfs would go on without credentials
        raise StoreError(
            f"GOOGLE_APPLICATION_CREDENTIALS: there is no file {key_file}", "credential"
        )
    # As an option, another endpoint is another instance.
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    return {"requests_timeout": _aiohttp_timeout()} | (
        {"endpoint_url": emulator} if emulator else {}
    )


def _azure() -> dict[str, Any]:
    # With no key in the environment: managed and workload identity, or `az login`.
    keys = (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_SAS_TOKEN",
    )
    _silence("azure.identity")
    return {
        "anon": False if not any(os.environ.get(key) for key in keys) else None,
        "connection_timeout": int(CONNECT_SECONDS),
        "read_timeout": int(answer_seconds()),
    }


def _web() -> dict[str, Any]:
    return {"client_kwargs": {"timeout": _aiohttp_timeout()}}


def _aiohttp_timeout() -> Any:
    """Return a limit of silence. A large file may take any time."""
    import aiohttp

    return aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_SECONDS, sock_read=answer_seconds()
    )


def _silence(logger: str) -> None:
    """Keep a client from logging errors, with stack traces, which it raises as well."""
    if logging.getLogger(logger).level == logging.NOTSET:
        logging.getLogger(logger).setLevel(logging.CRITICAL)


_OPTIONS: Mapping[Scheme, Callable[[], dict[str, Any]]] = {
    "s3": _s3,
    "gs": _gcs,
    "az": _azure,
    "hf": dict,
    "https": _web,
    "http": _web,
}
