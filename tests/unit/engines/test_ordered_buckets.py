"""The plugin's middleware that takes buckets in the order in which they are sent."""

from __future__ import annotations

import asyncio
import json
from types import ModuleType
from typing import Any

import pytest

from sluice.engines.sglang.control import BUCKET_HEADER
from tests.unit.engines.conftest import Plugin


@pytest.fixture
def module(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = plugin("http.ordered_buckets")
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.2)
    return module


class Engine:
    """An application that works on one request at a time, in the order in which it gets them."""

    def __init__(self, module: Any) -> None:
        self.taken: list[str] = []
        self.door = module.OrderedBuckets(self.serve)
        self._work = asyncio.Lock()

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert message["type"] == "http.request", "as ASGI names it"
        async with self._work:
            self.taken.append(message["body"].decode())
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(self, body: str, turn: str = "", late: int = 0) -> tuple[int, str]:
        """(status, message). late: pieces of the body that come one after the other before it."""
        sent: list[Any] = []
        pieces = [b""] * late + [body.encode()]

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(0.005)
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        headers = [(b"host", b"a"), *([(BUCKET_HEADER.encode(), turn.encode())] if turn else [])]
        await self.door({"type": "http", "path": "/x", "headers": headers}, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"]).get("message", "")


async def test_a_later_bucket_waits_for_those_before_it(module: ModuleType) -> None:
    engine = Engine(module)
    order = (2, 0, 3, 1)
    answers = await asyncio.gather(
        *(engine.ask(str(number), f"link/{number}", late=3 - number) for number in order)
    )
    assert engine.taken == ["0", "1", "2", "3"]
    assert answers == [(200, "")] * 4


async def test_a_bucket_whose_body_comes_slowly_is_not_overtaken(module: ModuleType) -> None:
    engine = Engine(module)
    await asyncio.gather(engine.ask("0", "link/0", late=20), engine.ask("1", "link/1"))
    assert engine.taken == ["0", "1"]


async def test_a_bucket_whose_predecessor_never_comes_is_refused(module: ModuleType) -> None:
    engine = Engine(module)
    assert await engine.ask("0", "link/0") == (200, "")
    message = "link: bucket 1 has not come before bucket 2"
    assert await engine.ask("2", "link/2") == (409, message)
    assert await engine.ask("1", "link/1") == (200, "")
    assert engine.taken == ["0", "1"]


async def test_a_bucket_is_not_received_twice(module: ModuleType) -> None:
    engine = Engine(module)
    assert await engine.ask("0", "link/0") == (200, "")
    assert await engine.ask("0", "link/0") == (409, "link: bucket 0 has come before")


@pytest.mark.parametrize("turn", ["link", "link/x", "link/-1", "link/"])
async def test_a_malformed_bucket_header_is_refused(module: ModuleType, turn: str) -> None:
    engine = Engine(module)
    expected = "expected a communicator and a number, as sluice-rollout-0/3"
    assert await engine.ask("0", turn) == (409, f"x-sluice-bucket: {turn!r}: {expected}")
    assert engine.taken == []


async def test_communicators_do_not_wait_for_each_other_and_old_ones_are_forgotten(
    module: ModuleType,
) -> None:
    engine = Engine(module)
    for way in range(20):
        assert await engine.ask(f"{way}", f"way-{way}/0") == (200, "")
    assert await engine.ask("second", "way-19/1") == (200, "")
    assert len(engine.door.following) <= module._KEPT + 1


async def test_a_request_without_the_header_passes(module: ModuleType) -> None:
    engine = Engine(module)
    assert await engine.ask("generate") == (200, "")
    assert engine.door.following == {}


async def test_a_request_that_fails_does_not_hold_others_up(module: ModuleType) -> None:
    engine = Engine(module)

    async def fail(*_: Any) -> None:
        raise RuntimeError("no")

    engine.door.app = fail
    with pytest.raises(RuntimeError, match="no"):
        await engine.ask("0", "link/0")
    engine.door.app = engine.serve
    assert await engine.ask("1", "link/1") == (200, "")
