"""The plugin's middleware that lets other calls overtake requests to generate."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest

from sluice.engines.sglang.client import Client
from tests.unit.engines.conftest import Plugin


@pytest.fixture
def module(plugin: Plugin) -> ModuleType:
    return plugin("http.control_priority")


class Engine:
    """An application that notes which calls it has begun."""

    def __init__(self, module: Any) -> None:
        self.begun: list[str] = []
        self.paused = False
        self.turns = module.RequestQueue(lambda: self.paused)
        self.door = module.ControlPriority(self.serve, self.turns)

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append(scope.get("name", scope["type"]))

    def ask(self, name: str, path: str) -> asyncio.Task[None]:
        scope = {"type": "http", "path": path, "name": name}
        return asyncio.create_task(self.door(scope, None, None))


async def test_other_calls_overtake_requests_that_came_before(module: ModuleType) -> None:
    engine = Engine(module)
    requests = [engine.ask(str(number), Client.generate_path) for number in range(512)]
    pause = engine.ask("pause", "/pause_generation")
    await asyncio.gather(*requests, pause)
    others = [name for name in engine.begun if name != "pause"]
    assert others == [str(number) for number in range(512)]
    assert engine.begun.index("pause") <= module._AT_ONCE


async def test_calls_that_come_later_overtake_waiting_requests(module: ModuleType) -> None:
    engine = Engine(module)
    requests = [engine.ask(str(number), Client.generate_path) for number in range(512)]
    while len(engine.begun) < 100:
        await asyncio.sleep(0)
    before = len(engine.begun)
    await engine.ask("pause", "/pause_generation")
    assert engine.begun.index("pause") <= before + 2 * module._AT_ONCE
    await asyncio.gather(*requests)


async def test_a_request_whose_client_has_left_does_not_hold_others_up(module: ModuleType) -> None:
    engine = Engine(module)
    requests = [engine.ask(str(number), Client.generate_path) for number in range(64)]
    await asyncio.sleep(0)
    for request in requests[:-1]:
        request.cancel()
    await asyncio.wait(requests)
    assert engine.begun == ["63"]
    await engine.ask("later", Client.generate_path)
    assert engine.begun == ["63", "later"]
    assert not engine.turns.waiting


async def test_the_lifespan_of_the_server_is_not_queued(module: ModuleType) -> None:
    engine = Engine(module)
    await engine.door({"type": "lifespan"}, None, None)
    assert engine.begun == ["lifespan"]


async def test_in_a_pause_no_request_begins_and_all_do_after_it(module: ModuleType) -> None:
    engine = Engine(module)
    requests = [engine.ask(str(number), Client.generate_path) for number in range(64)]
    while len(engine.begun) < 2 * module._AT_ONCE:
        await asyncio.sleep(0)
    engine.paused = True
    await asyncio.sleep(0)
    before = list(engine.begun)
    requests += [engine.ask(str(number), Client.generate_path) for number in range(64, 128)]
    for _ in range(64):
        await asyncio.sleep(0)
    await engine.ask("resume", "/continue_generation")
    assert engine.begun == [*before, "resume"]
    engine.paused = False
    await asyncio.wait_for(asyncio.gather(*requests), 10)
    engine.begun.remove("resume")
    assert engine.begun == [str(number) for number in range(128)]


async def test_an_abort_concerns_all_requests_that_came_before_it(module: ModuleType) -> None:
    """SGLang aborts those that it has begun with, also in a pause."""
    engine = Engine(module)
    engine.paused = True
    requests = [engine.ask(str(number), Client.generate_path) for number in range(64)]
    await asyncio.sleep(0)
    await engine.ask("abort", "/abort_request")
    assert engine.begun == [*(str(number) for number in range(64)), "abort"]
    await asyncio.gather(*requests)
    later = engine.ask("later", Client.generate_path)
    await asyncio.sleep(0)
    assert "later" not in engine.begun
    engine.paused = False
    await asyncio.wait_for(later, 10)
