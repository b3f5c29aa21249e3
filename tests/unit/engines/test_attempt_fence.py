"""The plugins' middleware that refuses a trainer which was replaced."""

from __future__ import annotations

import json
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sluice.engines.http.control import SOURCE_HEADER
from tests.unit.engines.conftest import Plugin


@pytest.fixture
def fence(plugin: Plugin) -> ModuleType:
    return plugin("http.attempt_fence")


async def call(fence: Any, *headers: tuple[bytes, bytes]) -> tuple[int, Any]:
    """(status, answer) of a request, which the application behind answers with 200."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> None: ...

    scope = {"type": "http", "path": "/x", "headers": [(b"host", b"a"), *headers]}
    await fence(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def test_the_first_call_of_a_newer_attempt_makes_older_ones_refused(
    fence: SimpleNamespace,
) -> None:
    attempt_fence = fence.Fence(application)

    def source(attempt: int) -> tuple[bytes, bytes]:
        return (fence.HEADER, f"trainer-0/{attempt}".encode())

    for attempt in (1, 1, 9, 10):
        assert await call(attempt_fence, source(attempt)) == (200, {})
    refused = {"success": False, "message": "trainer-0: attempt 9 was replaced by attempt 10"}
    assert await call(attempt_fence, source(9)) == (409, refused)
    assert await call(attempt_fence, source(10)) == (200, {})


async def test_calls_without_a_source_always_pass(fence: SimpleNamespace) -> None:
    attempt_fence = fence.Fence(application)
    await call(attempt_fence, (fence.HEADER, b"trainer-0/2"))
    assert await call(attempt_fence) == (200, {})
    assert await call(attempt_fence, (fence.HEADER, b"another/1")) == (200, {})


async def test_a_source_without_an_attempt_is_refused(fence: SimpleNamespace) -> None:
    status, answer = await call(fence.Fence(application), (fence.HEADER, b"trainer-0"))
    assert status == 409
    assert "expected a trainer's name and attempt" in answer["message"]


def test_trainer_and_plugin_use_the_same_header(fence: SimpleNamespace) -> None:
    assert SOURCE_HEADER.encode() == fence.HEADER
