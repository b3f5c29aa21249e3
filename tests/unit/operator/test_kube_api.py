"""Requests to an API server, and its errors as types, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration
from multidict import CIMultiDict

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api, merge_patch, without_empty


class Server:
    """Answers in order; notes what it was asked."""

    api: Api

    def __init__(self) -> None:
        self.answers: list[web.Response] = []
        self.requests: list[tuple[str, str, str, Any]] = []
        self.codes: list[tuple[str, int]] = []

    def note(self, method: str, code: int) -> None:
        self.codes.append((method, code))

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path_qs, request.content_type, body))
        return self.answers.pop(0)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as running:
        configuration = Configuration()
        configuration.host = str(running.make_url("")).rstrip("/")
        async with Api(configuration, server.note) as server.api:
            yield server


@pytest.mark.parametrize(
    ("status", "reason", "type_"),
    [
        (409, "Conflict", errors.ConflictError),
        (409, "AlreadyExists", errors.AlreadyExistsError),
        (410, "Expired", errors.GoneError),
        (422, "Invalid", errors.InvalidError),
        (429, "TooManyRequests", errors.ThrottledError),
        (403, "Forbidden", errors.ForbiddenError),
        (500, "InternalError", errors.ServerFailedError),
        (503, "ServiceUnavailable", errors.ServerFailedError),
        (503, "", errors.UnavailableError),
    ],
)
async def test_errors_are_typed_and_carry_the_servers_words(
    server: Any, status: int, reason: str, type_: type[errors.ApiError]
) -> None:
    server.answers.append(
        web.json_response({"reason": reason, "message": "because"}, status=status)
    )
    with pytest.raises(type_, match="because") as caught:
        await server.api.get("/api/v1/x")
    assert type(caught.value) is type_
    assert server.codes == [("GET", status)]


@pytest.mark.parametrize(
    ("answer", "type_"),
    [
        (
            web.json_response(
                {"reason": "NotFound", "details": {"name": "x", "kind": "pods"}}, status=404
            ),
            errors.NotFoundError,
        ),
        (
            web.json_response({"reason": "NotFound", "details": {}}, status=404),
            errors.MissingApiError,
        ),
        (web.Response(text="404 page not found", status=404), errors.MissingApiError),
    ],
    ids=["no object", "no kind", "no path"],
)
async def test_an_object_that_is_not_there_is_told_from_a_kind_that_is_not_known(
    server: Any, answer: web.Response, type_: type[errors.ApiError]
) -> None:
    server.answers.append(answer)
    with pytest.raises(errors.NotFoundError) as caught:
        await server.api.get("/api/v1/x")
    assert type(caught.value) is type_


async def test_a_creation_in_a_namespace_that_is_being_deleted_is_told_from_other_refusals(
    server: Any,
) -> None:
    causes = [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]
    answer = {"reason": "Forbidden", "details": {"name": "x", "causes": causes}}
    server.answers.append(web.json_response(answer, status=403))
    with pytest.raises(errors.NamespaceEndingError):
        await server.api.create("/api/v1/x", {})


async def test_a_throttled_request_says_how_long_to_wait(server: Any) -> None:
    server.answers.append(
        web.json_response({"message": "slow down"}, status=429, headers={"Retry-After": "7"})
    )
    with pytest.raises(errors.ThrottledError) as caught:
        await server.api.get("/api/v1/x")
    assert caught.value.retry_after == 7


async def test_who_is_asked_to_come_back_soon_does(server: Any) -> None:
    busy = [
        web.json_response({"message": "slow down"}, status=429, headers={"Retry-After": "0"})
        for _ in range(3)
    ]
    server.answers += [*busy, web.json_response({"kind": "Pod"})]
    assert await server.api.create("/api/v1/x", {"a": 1}) == {"kind": "Pod"}
    assert server.codes == [("POST", 429)] * 3 + [("POST", 200)]
    assert {str(body) for _, _, _, body in server.requests} == {"{'a': 1}"}


async def test_a_proxys_page_is_an_error_too(server: Any) -> None:
    server.answers.append(web.Response(text="<html>bad gateway</html>", status=502))
    with pytest.raises(errors.UnavailableError, match="bad gateway"):
        await server.api.get("/api/v1/x")


async def test_no_server_is_an_error_too() -> None:
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:9"
    async with Api(configuration) as api:
        with pytest.raises(errors.UnavailableError):
            await api.get("/api/v1/x")


async def test_apply_is_server_side_and_ours(server: Any) -> None:
    server.answers.append(web.json_response({"kind": "ConfigMap"}))
    await server.api.apply("/api/v1/namespaces/n/configmaps/c", {"kind": "ConfigMap"})
    ((method, path, content, body),) = server.requests
    assert (method, content, body) == (
        "PATCH",
        "application/apply-patch+yaml",
        {"kind": "ConfigMap"},
    )
    assert (
        path
        == "/api/v1/namespaces/n/configmaps/c?fieldManager=sluice&fieldValidation=Strict&force=true"
    )


async def test_what_is_made_may_have_no_field_that_the_server_does_not_know(server: Any) -> None:
    """A status may: that of a newer operator must not stop jobs while the CRD is an older one."""
    server.answers += [web.json_response({}) for _ in range(3)]
    await server.api.create("/api/v1/pods", {})
    await server.api.replace("/api/v1/pods/p", {})
    await server.api.merge("/apis/sluice.dev/v1alpha1/rljobs/j/status", {})
    queries = [path.partition("?")[2] for _, path, _, _ in server.requests]
    strict = "fieldManager=sluice&fieldValidation=Strict"
    assert queries == [strict, strict, "fieldManager=sluice"]


async def test_what_the_server_warns_of_is_handed_on(server: Any) -> None:
    headers = [
        ("Warning", '299 - "the \\"x\\" is old"'),
        ("Warning", '299 - "a", 299 - "b" "Sun"'),
        ("Warning", "odd"),
    ]
    server.answers.append(web.json_response({}, headers=CIMultiDict(headers)))
    heard: list[str] = []
    await server.api.create("/api/v1/pods", {}, heard.append)
    assert heard == ['the "x" is old', "a", "b"]


async def test_lists_are_read_page_by_page(server: Any) -> None:
    items = [{"metadata": {"uid": "a"}}]
    pages = [
        ({"continue": "more", "resourceVersion": "5"}, items),
        ({"resourceVersion": "5"}, None),
    ]
    server.answers += [
        web.json_response({"metadata": metadata, "items": items}) for metadata, items in pages
    ]
    assert await server.api.list_uids("/api/v1/pods", "a=b") == ({"a"}, 5)
    assert [path for _, path, _, _ in server.requests] == [
        "/api/v1/pods?limit=100&labelSelector=a%3Db",
        "/api/v1/pods?limit=100&labelSelector=a%3Db&continue=more",
    ]


@pytest.mark.parametrize(
    ("old", "new", "patch"),
    [
        ({"a": 1}, {"a": 1}, {}),
        ({"a": 1}, {}, {"a": None}),
        ({}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, {"a": {"c": None}}),
        ({"a": [1, 2]}, {"a": [1]}, {"a": [1]}),
        ({"a": 0}, {"a": False}, {}),
    ],
    ids=str,
)
def test_a_merge_patch_holds_only_what_differs(old: Any, new: Any, patch: Any) -> None:
    assert merge_patch(old, new) == patch


def test_empty_texts_of_a_status_are_left_out() -> None:
    status = {
        "state": "",
        "step": 0,
        "failure": {"container": "", "pod": "p"},
        "list": [{"message": ""}, 1],
    }
    assert without_empty(status) == {"step": 0, "failure": {"pod": "p"}, "list": [{}, 1]}
