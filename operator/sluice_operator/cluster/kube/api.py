"""Requests to an API server in plain dicts, and the one place where its errors become types.

The client's generated models are not used: importing them costs more memory than everything else of
the operator, and a server that is newer than them would lose fields.
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
_STRICT = {**_WRITE, "fieldValidation": "Strict"}
"""For whole objects: the server refuses a field that it does not know instead of dropping it."""
CALL_SECONDS = 20.0
CONNECTIONS = 32
PAGE = 100
"""Objects in a part of a list. A whole pod takes 50 kB while it is parsed;
larger parts are hardly faster."""
THROTTLED_TRIES, THROTTLED_SECONDS = 10, 5.0
_NAMESPACE_ENDS = "NamespaceTerminating"
"""Cause of a refused creation in a namespace that is being deleted."""
_ENDLESS = aiohttp.ClientTimeout(total=None, sock_connect=CALL_SECONDS)

Observer = Callable[[str, int], None]
"""Told about each request: method and HTTP code; code 0: no answer."""
Listener = Callable[[str], None]
"""Told what the server warns of while it does what was asked."""


class Api:
    """Use as `async with await Api.connect() as api`."""

    def __init__(self, configuration: Any, observer: Observer | None = None) -> None:
        configuration.connection_pool_maxsize = CONNECTIONS
        self._client: Any = ApiClient(configuration)
        self._client.user_agent = "sluice-operator"
        self._host = str(configuration.host)
        self._observer = observer or (lambda method, code: None)

    @classmethod
    async def connect(cls, observer: Observer | None = None) -> Self:
        """In a pod with its service account, elsewhere with KUBECONFIG."""
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
            text = "no API server is known: run in a pod with a service account, or set KUBECONFIG"
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
        """Server-side apply.

        Only for objects that are known to be ours: conflicts are decided for us.
        """
        return await self._request(
            "PATCH", path, body, {**_STRICT, "force": "true"}, APPLY, warned=warned
        )

    async def merge(
        self, path: str, body: KubeObject, warned: Listener | None = None
    ) -> KubeObject:
        """Not strict: the status of an operator that is newer than the CRD must not
        stop its jobs.
        """
        return await self._request("PATCH", path, body, _WRITE, MERGE, warned=warned)

    async def replace(self, path: str, body: KubeObject) -> KubeObject:
        return await self._request("PUT", path, body, _STRICT)

    async def delete(self, path: str, options: KubeObject) -> KubeObject:
        return await self._request("DELETE", path, options)

    async def pages(
        self, path: str, selector: str = "", accept: str = "application/json"
    ) -> AsyncIterator[KubeObject]:
        """A list, page by page."""
        query: dict[str, Any] = {"limit": PAGE} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self.get(path, query, accept)
            yield page
            following = page["metadata"].get("continue")
            if not following:
                return
            query["continue"] = following

    async def list_uids(self, path: str, selector: str = "") -> tuple[set[str], int]:
        """The uids of all objects, and the version of the list."""
        uids: set[str] = set()
        at = 0
        async for page in self.pages(path, selector, METADATA_LIST):
            uids |= {str(each["metadata"]["uid"]) for each in page["items"] or []}
            at = int(page["metadata"]["resourceVersion"])
        return uids, at

    async def lines(self, path: str, query: Mapping[str, Any]) -> AsyncIterator[str]:
        """A text, line by line as it comes, until the server ends it: a log that is followed may
        take for ever.
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
        """Ask again where the server had no time (429), as client-go does: it has not begun."""
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
        """The client's response, its body not read yet."""
        headers = {"Accept": accept, "Content-Type": content, **self._client.default_headers}
        url = f"{self._host}{path}" + (f"?{urlencode(query)}" if query else "")
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        return await self._client.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=timeout
        )

    @contextlib.contextmanager
    def _as_unavailable(self, method: str, path: str) -> Iterator[None]:
        """Nobody answered, or not to the end."""
        try:
            yield
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._observer(method, 0)
            raise errors.UnavailableError(
                f"{method} {path}: {error or type(error).__name__}"
            ) from error


def error_of(status: int, text: bytes, headers: Mapping[str, str], what: str) -> errors.ApiError:
    """The typed error of an answer. Proxies answer with pages instead of a Status object."""
    try:
        answer = json.loads(text)
        reason, message = str(answer.get("reason", "")), str(answer.get("message", ""))
        details = answer.get("details") or {}
        retry, known = details.get("retryAfterSeconds"), bool(details.get("name"))
        causes = {str(each.get("reason", "")) for each in details.get("causes") or []}
    except (ValueError, AttributeError):
        reason, message, retry, known = "", text[:200].decode(errors="replace"), None, False
        causes = set()
    delay = float(headers["Retry-After"]) if headers.get("Retry-After", "").isdigit() else retry
    if (
        status == 404 and not known
    ):  # of a kind that it knows, an API server names the object that is not there
        return errors.MissingApiError(f"{what}: the API server does not have this API", status)
    type_ = _type(status, reason, causes)
    return type_(message or f"{what}: HTTP {status}", status, delay)


def _is_short_of_time(error: errors.ApiError) -> bool:
    """The server asks to come back soon."""
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
    """The merge patch that turns `old` into `new`; empty: they are equal. Lists are replaced as a
    whole; null removes a field.
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
    """The value without its empty texts: a status leaves them out, and Kubernetes 1.20 takes them
    for null.
    """
    if isinstance(value, dict):
        return {name: without_empty(each) for name, each in value.items() if each != ""}
    if isinstance(value, list):
        return [without_empty(each) for each in value]
    return value
