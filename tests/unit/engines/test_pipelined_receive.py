"""The plugin's passing on of requests for buckets while earlier ones are loaded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.engines.conftest import Plugin


@pytest.fixture
def module(plugin: Plugin) -> ModuleType:
    return plugin("weights.pipelined_receive")


@dataclass(frozen=True)
class Request:
    name: str
    group_name: str = "sluice-rollout-0"
    weight_version: str | None = None
    flush_cache: bool = False


@dataclass(eq=False)
class Communicator:
    """SGLang's communicator: it sends a request once the one before has its answers."""

    module: Any
    _fan_out: int = 1
    sent: list[str] = field(default_factory=list)
    _queueing_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: Any = None
    values: list[Any] = field(default_factory=list)

    def _send(self, request: Request) -> None:
        self.sent.append(request.name)

    async def __call__(self, request: Request) -> list[Any]:
        async with self._queueing_lock:
            self._send(request)
            self.waiting, self.values = asyncio.Event(), []
            await self.waiting.wait()
            return self.values

    def handle_recv(self, answer: Any) -> None:
        self.values.append(answer)
        if len(self.values) == self._fan_out:
            self.waiting.set()

    @staticmethod
    def merge_results(results: list[Any]) -> tuple[bool, str]:
        return all(r.success for r in results), " | ".join(r.message for r in results)

    def answer(self, message: str, *, success: bool = True) -> None:
        """The scheduler's, as it comes to SGLang."""
        answer = SimpleNamespace(success=success, message=message)
        self.module.answered(Communicator.handle_recv, self, answer)


class Manager:
    """The part of SGLang's HTTP process that the plugin changes."""

    def __init__(self, module: Any, fan_out: int = 1) -> None:
        self.module = module
        self.is_pause = True
        self.update_weights_from_distributed_communicator = Communicator(module, fan_out)

    def auto_create_handle_loop(self) -> None:
        return

    async def update(self, request: Request) -> tuple[bool, str]:
        communicator = self.update_weights_from_distributed_communicator
        return communicator.merge_results(await communicator(request))

    def ask(self, *requests: Request) -> list[asyncio.Task[tuple[bool, str]]]:
        original = Manager.update
        return [
            asyncio.create_task(self.module.ask(original, self, request)) for request in requests
        ]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_go_on_without_the_answers_of_those_before_them(module: ModuleType) -> None:
    manager = Manager(module)
    requests = manager.ask(Request("0"), Request("1"), Request("2", weight_version="7"))
    communicator = manager.update_weights_from_distributed_communicator
    await turns()
    assert communicator.sent == ["0", "1", "2"]
    for number in range(3):
        communicator.answer(f"loaded {number}")
    assert [await task for task in requests] == [(True, f"loaded {number}") for number in range(3)]


async def test_a_request_of_sglangs_is_answered_first(module: ModuleType) -> None:
    manager = Manager(module)
    requests = manager.ask(Request("whole", flush_cache=True), Request("0"))
    communicator = manager.update_weights_from_distributed_communicator
    await turns()
    assert communicator.sent == ["whole"]
    communicator.answer("flushed")
    await turns()
    assert communicator.sent == ["whole", "0"]
    communicator.answer("loaded")
    assert [await task for task in requests] == [(True, "flushed"), (True, "loaded")]


async def test_each_of_several_schedulers_answers_each_request(module: ModuleType) -> None:
    manager = Manager(module, fan_out=2)
    first, second = manager.ask(Request("0"), Request("1"))
    communicator = manager.update_weights_from_distributed_communicator
    await turns()
    communicator.answer("a")
    communicator.answer("no memory", success=False)
    communicator.answer("c")
    assert await first == (False, "a | no memory")
    await turns()
    assert not second.done()
    communicator.answer("d")
    assert await second == (True, "c | d")


async def test_the_answer_for_a_client_that_has_left_does_not_go_to_another(
    module: ModuleType,
) -> None:
    manager = Manager(module)
    gone, stays = manager.ask(Request("0"), Request("1"))
    communicator = manager.update_weights_from_distributed_communicator
    await turns()
    gone.cancel()
    await turns()
    communicator.answer("first")
    communicator.answer("second")
    assert await stays == (True, "second")


@pytest.mark.parametrize(
    ("pause", "request_"),
    [(False, Request("0")), (True, Request("0", group_name="somebody-elses"))],
    ids=["an engine that generates", "somebody else's weights"],
)
async def test_other_requests_are_handled_by_sglang(
    module: ModuleType, pause: bool, request_: Request
) -> None:
    manager = Manager(module)
    manager.is_pause = pause
    [first, _] = manager.ask(request_, request_)
    communicator = manager.update_weights_from_distributed_communicator
    await turns()
    assert communicator.sent == ["0"]
    communicator.answer("loaded")
    assert await first == (True, "loaded")
    await turns()
    assert communicator.sent == ["0", "0"]
