"""Requests to an API server with plain dicts, and the conversion of its errors into types.

The client's generated models are not used. Importing them costs more memory than the rest of the
operator, and they would drop the fields of a newer server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import load_incluster_config
from kubernetes.aio.config.kube_config import load_kube_config

from sluice.runtime.pod_env import ConfigurationError
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.server_warnings import warnings_of
from sluice_operator.plan.facts.model import KubeObject

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
FIELD_MANAGER = "sluice"
_WRITE = {"fieldManager": FIELD_MANAGER}
# For whole objects: the server refuses an unknown field instead of dropping it.
_STRICT = {**_WRITE, "fieldValidation": "Strict"}
CALL_SECONDS = 20.0
CONNECTIONS = 32
# Objects in a page of a list. A whole pod takes 50 kB while it is parsed, and larger pages are
# hardly faster.
PAGE = 100
THROTTLED_TRIES, THROTTLED_SECONDS = 10, 5.0
# Cause of a refused creation in a namespace that is being deleted.
_NAMESPACE_ENDS = "NamespaceTerminating"
_ENDLESS = aiohttp.ClientTimeout(total=None, sock_connect=CALL_SECONDS)

# Called for each request with its method and HTTP code, or 0 without an answer.
Observer = Callable[[str, int], None]
# Called with each warning of the server about a request that succeeded.
Listener = Callable[[str], None]


class Api:
    """A connection to an API server, used as `async with await Api.connect() as api`."""

    def __init__(self, configuration: Any, observer: Observer | None = None) -> None:
        configuration.connection_pool_maxsize = CONNECTIONS
        self._client: Any = ApiClient(configuration)
        self._client.user_agent = "sluice-operator"
        self._host = str(configuration.host)
        self._observer = observer or (lambda method, code: None)

    @classmethod
    async def connect(cls, observer: Observer | None = None) -> Self:
        """Connect with the service account in a pod, and with KUBECONFIG otherwise.

        Raises ConfigurationError if there is no configuration.
        """
        configuration: Any = Configuration()
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST"):
                load_incluster_config(client_configuration=configuration)
            else:
                file = os.environ.get("KUBECONFIG") or None
                await load_kube_config(
                    file, client_configuration=configuration, persist_config=False
                )
        except ConfigException as error:
            text = "no API server is known: set KUBECONFIG, or run in a pod with an account"
            raise ConfigurationError(f"{text} ({error})") from error
        return cls(configuration, observer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def get(
        self, path: str, query: Mapping[str, Any] | None = None, accept: str = "application/json"
    ) -> KubeObject:
        return await self._request("GET", path, query=query, accept=accept)

    async def create(
        self, path: str, body: KubeObject, warned: Listener | None = None
    ) -> KubeObject:
        return await self._request("POST", path, body, _STRICT, warned=warned)

    async def apply(
        self, path: str, body: KubeObject, warned: Listener | None = None
    ) -> KubeObject:
        """Server-side apply, which overrides other field managers.

        It is only for objects that belong to the operator.
        """
        return await self._request(
            "PATCH", path, body, {**_STRICT, "force": "true"}, APPLY, warned=warned
        )

    async def merge(
        self, path: str, body: KubeObject, warned: Listener | None = None
    ) -> KubeObject:
        """Merge patch (RFC 7386)."""
        # Not strict: jobs must not fail because the operator's status is newer than the CRD.
        return await self._request("PATCH", path, body, _WRITE, MERGE, warned=warned)

    async def replace(self, path: str, body: KubeObject) -> KubeObject:
        return await self._request("PUT", path, body, _STRICT)

    async def delete(self, path: str, options: KubeObject) -> KubeObject:
        return await self._request("DELETE", path, options)

    async def pages(
        self, path: str, selector: str = "", accept: str = "application/json"
    ) -> AsyncIterator[KubeObject]:
        """Yield the pages of a list."""
        query: dict[str, Any] = {"limit": PAGE} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self.get(path, query, accept)
            yield page
            following = page["metadata"].get("continue")
            if not following:
                return
            query["continue"] = following

    async def list_uids(self, path: str, selector: str = "") -> tuple[set[str], int]:
        """Return the uids of all objects, and the version of the list."""
        uids: set[str] = set()
        list_version = 0
        async for page in self.pages(path, selector, METADATA_LIST):
            uids |= {str(item["metadata"]["uid"]) for item in page["items"] or []}
            list_version = int(page["metadata"]["resourceVersion"])
        return uids, list_version

    async def lines(self, path: str, query: Mapping[str, Any]) -> AsyncIterator[str]:
        """Yield the lines of a text as they come, until the server ends it.

        A log that is followed may never end.
        """
        rest = b""
        with self._as_unavailable("GET", path):
            async with asyncio.timeout(CALL_SECONDS):
                response = await self._send(
                    "GET", path, None, query, accept="*/*", timeout=_ENDLESS
                )
            if response.status >= 400:
                raise error_of(
                    response.status, await response.read(), response.headers, f"GET {path}"
                )
            with contextlib.closing(response.response):
                async for chunk in response.response.content.iter_any():
                    *whole, rest = (rest + chunk).split(b"\n")
                    for line in whole:
                        yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    async def _request(
        self,
        method: str,
        path: str,
        body: KubeObject | None = None,
        query: Mapping[str, Any] | None = None,
        content: str = "application/json",
        accept: str = "application/json",
        warned: Listener | None = None,
    ) -> KubeObject:
        # A request that the server throttles (429) has not begun, so it is sent again, as client-go
        # does.
        for left in reversed(range(THROTTLED_TRIES)):
            with self._as_unavailable(method, path):
                async with asyncio.timeout(CALL_SECONDS):
                    response = await self._send(method, path, body, query, content, accept)
                    text = await response.read()
            self._observer(method, response.status)
            if response.status < 400:
                break
            error = error_of(response.status, text, response.headers, f"{method} {path}")
            if not left or not _is_short_of_time(error):
                raise error
            await asyncio.sleep((error.retry_after or 0.0) * random.uniform(0.5, 1.5))
        if warned is not None:
            for warning in warnings_of(response.headers.getall("Warning", ())):
                warned(warning)
        answer: KubeObject = json.loads(text)
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        body: KubeObject | None,
        query: Mapping[str, Any] | None,
        content: str = "application/json",
        accept: str = "application/json",
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> Any:
        """Return the client's response, whose body has not been read yet."""
        headers = {"Accept": accept, "Content-Type": content, **self._client.default_headers}
        url = f"{self._host}{path}" + (f"?{urlencode(query)}" if query else "")
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        return await self._client.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=timeout
        )

    @contextlib.contextmanager
    def _as_unavailable(self, method: str, path: str) -> Iterator[None]:
        """Convert a missing or incomplete answer into UnavailableError."""
        try:
            yield
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._observer(method, 0)
            raise errors.UnavailableError(
                f"{method} {path}: {error or type(error).__name__}"
            ) from error


def error_of(status: int, text: bytes, headers: Mapping[str, str], what: str) -> errors.ApiError:
    """Return the typed error for an answer."""
    try:
        answer = json.loads(text)
        reason, message = str(answer.get("reason", "")), str(answer.get("message", ""))
        details = answer.get("details") or {}
        retry, names_object = details.get("retryAfterSeconds"), bool(details.get("name"))
        causes = {str(cause.get("reason", "")) for cause in details.get("causes") or []}
    # Proxies answer with pages instead of a Status object.
    except (ValueError, AttributeError):
        reason, message, retry, names_object = "", text[:200].decode(errors="replace"), None, False
        causes = set()
    delay = float(headers["Retry-After"]) if headers.get("Retry-After", "").isdigit() else retry
    # For a kind that it serves, an API server names the missing object.
    if status == 404 and not names_object:
        return errors.MissingApiError(f"{what}: the API server does not have this API", status)
    type_ = _type(status, reason, causes)
    return type_(message or f"{what}: HTTP {status}", status, delay)


def _is_short_of_time(error: errors.ApiError) -> bool:
    """Return True if the server asks for another try soon."""
    return (
        error.status == 429
        and error.retry_after is not None
        and error.retry_after <= THROTTLED_SECONDS
    )


def _type(status: int, reason: str, causes: Collection[str]) -> type[errors.ApiError]:
    if status == 409 and reason == "AlreadyExists":
        return errors.AlreadyExistsError
    if status == 403 and _NAMESPACE_ENDS in causes:
        return errors.NamespaceEndingError
    if status >= 500:
        return errors.ServerFailedError if reason else errors.UnavailableError
    types = {
        400: errors.InvalidError,
        401: errors.ForbiddenError,
        403: errors.ForbiddenError,
        404: errors.NotFoundError,
        409: errors.ConflictError,
        410: errors.GoneError,
        422: errors.InvalidError,
        429: errors.ThrottledError,
    }
    return types.get(status, errors.ApiError)


def merge_patch(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the smallest merge patch (RFC 7386) from `old` to `new`; empty if they are equal.

    It replaces lists as a whole; null removes a field.
    """
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = merge_patch(before, value)
            if inner:
                patch[name] = inner
        elif name not in old or before != value:
            patch[name] = value
    return patch


def without_empty(value: Any) -> Any:
    """Return the value without its empty texts, which Kubernetes 1.20 treats as null."""
    if isinstance(value, dict):
        return {name: without_empty(item) for name, item in value.items() if item != ""}
    if isinstance(value, list):
        return [without_empty(item) for item in value]
    return value
